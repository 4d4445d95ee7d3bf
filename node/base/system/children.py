"""A child process with a socket between parent and child.

Where children inherit descriptors the socket is one end of a socket pair. Elsewhere (Windows) the child connects back
over loopback. Any user of the machine can connect to that port, or take it once the parent is gone; so each end sends
the other a secret of 32 random bytes, which the parent has written to the child's standard input.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final, NamedTuple

import trio

from farandole.protocol.wire.errors import RemoteProtocolError

from ..streams import read_exactly
from .features import HAS_TRACEBACK_SIGNAL, INHERITS_DESCRIPTORS
from .parent import CONNECT_SECONDS, PORT, SECRET_BYTES
from .signals import ASK
from .sockets import LOOPBACK, listen_alone

# A child that has connected sends its secret at once.
GREETING_SECONDS: Final = 5.0
# Strangers that have connected and are silent, or wait for a slot.
MAX_WAITING: Final = 8


class Child(NamedTuple):
    """A process, and this end of the connection with it."""

    process: trio.Process
    stream: trio.SocketStream


async def start_child(
    module: str,
    arguments: Sequence[str],
    inherited: Sequence[int],
    output: IO[bytes] | None,
    environment: Mapping[str, str],
) -> Child:
    """Run ``python -m module PARENT *arguments``; `farandole.node.base.system.parent` opens the other end from PARENT.

    ``inherited``: descriptors that stay open in it, where `INHERITS_DESCRIPTORS`. ``output``: where its output goes;
    None: this process's output. Raises `OSError`. The caller ends the process.
    """
    options: dict[str, Any] = {"stdout": output, "stderr": output, "env": environment}
    if sys.platform != "win32" and INHERITS_DESCRIPTORS:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await trio.lowlevel.open_process(
                    [sys.executable, "-P", "-m", module, str(theirs.fileno()), *arguments],
                    stdin=subprocess.DEVNULL if HAS_TRACEBACK_SIGNAL else subprocess.PIPE,
                    pass_fds=(theirs.fileno(), *inherited),
                    **options,
                )
        except BaseException:  # cancelled, too
            ours.close()
            raise
        return Child(process, trio.SocketStream(trio.socket.from_stdlib_socket(ours)))
    if sys.platform == "win32":
        options["creationflags"] = subprocess.BELOW_NORMAL_PRIORITY_CLASS
    with socket.socket() as unbound:
        listen_alone(unbound)
        unbound.bind((LOOPBACK, 0))
        listener = trio.socket.from_stdlib_socket(unbound)
        listener.listen(MAX_WAITING)
        process = await trio.lowlevel.open_process(
            [sys.executable, "-P", "-m", module, f"{PORT}{listener.getsockname()[1]}", *arguments],
            stdin=subprocess.PIPE,
            **options,
        )
        try:
            return Child(process, await _let_in(listener, process))
        except BaseException:  # cancelled, too: no caller has the process yet
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()
            raise


async def _let_in(listener: trio.socket.SocketType, process: trio.Process) -> trio.SocketStream:
    """Return the connection of the process, and of no other one; `OSError` if it does not connect."""
    theirs, ours = secrets.token_bytes(SECRET_BYTES), secrets.token_bytes(SECRET_BYTES)
    assert process.stdin is not None
    with contextlib.suppress(trio.BrokenResourceError):  # it has ended already: then it does not connect
        await process.stdin.send_all(theirs + ours)
    let_in: list[trio.SocketStream] = []
    async with trio.open_nursery() as nursery:
        slots = trio.CapacityLimiter(MAX_WAITING)

        async def give_up_at_end() -> None:
            with trio.move_on_after(CONNECT_SECONDS):
                await process.wait()
            nursery.cancel_scope.cancel()

        async def greet(connection: trio.socket.SocketType) -> None:
            stream = trio.SocketStream(connection)
            try:
                with (
                    trio.move_on_after(GREETING_SECONDS),
                    contextlib.suppress(trio.BrokenResourceError, RemoteProtocolError),
                ):
                    async with slots:
                        shown = await read_exactly(stream.receive_some, SECRET_BYTES)
                    if hmac.compare_digest(shown, theirs) and not let_in:
                        await stream.send_all(ours)
                        let_in.append(stream)
                        nursery.cancel_scope.cancel()
            finally:  # cancelled, too
                if stream not in let_in:
                    connection.close()

        nursery.start_soon(give_up_at_end)
        while True:
            connection, _ = await listener.accept()
            nursery.start_soon(greet, connection)
    if not let_in:
        raise OSError(f"it did not connect (exit code {process.returncode})")
    return let_in[0]


async def ask_where(process: trio.Process) -> None:
    """Ask a child that has called `tell_where` to print its tracebacks; it may not answer."""
    if sys.platform != "win32" and HAS_TRACEBACK_SIGNAL:
        process.send_signal(signal.SIGUSR1)
    elif process.stdin is not None:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await process.stdin.send_all(ASK)
