"""Child processes: a socket between parent and child, and the signals that they get."""

from __future__ import annotations

import faulthandler
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Final, NamedTuple

import trio

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and what service managers send."""


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
    """Run ``python -m module DESCRIPTOR *arguments``; the descriptor is the other end of the connection.

    ``inherited``: descriptors that stay open in it. ``output``: where its output goes; None: this process's output.
    Raises `OSError`. The caller ends the process.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = await trio.lowlevel.open_process(
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                pass_fds=(theirs.fileno(), *inherited),
            )
    except BaseException:  # cancelled, too
        ours.close()
        raise
    return Child(process, trio.SocketStream(trio.socket.from_stdlib_socket(ours)))


def ask_where(process: trio.Process) -> None:
    """Ask a child that has called `tell_where` to print its tracebacks; it may not answer."""
    process.send_signal(signal.SIGUSR1)


def tell_where(descriptor: int) -> None:
    """Write all threads' stacks to ``descriptor`` on a crash, or when the parent asks (`ask_where`)."""
    faulthandler.enable(descriptor)
    faulthandler.register(signal.SIGUSR1, descriptor)


def ignore_stop_signals() -> None:
    """Ignore signals to the whole process group: they are for the parent, which ends this process."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def signal_name(number: int) -> str:
    """Return a signal's usual name."""
    return next((known.name for known in signal.Signals if known == number), "one without a name")
