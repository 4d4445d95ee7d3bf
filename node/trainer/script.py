"""The socket at which a loop of this node's owner attaches, instead of a trainer process that the node starts.

The node listens on a socket for its owner alone (`farandole.node.base.system.sockets`). A loop that connects waits
there until the node wants a trainer. Then the node sends `Prepare`, and continues as with a process of its own.
One loop trains at a time; another one is dismissed with the reason. When a loop ends, for any reason, the node waits
for the next one.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import trio

from farandole.protocol.trainer import trainer_messages as messages

from ..base.nurseries import open_service_nursery
from ..base.system.sockets import bound_socket, serve_door
from .channel import open_shared_memory, place_for_others
from .trainer import SHARED, STOP, Trainer, TrainerError

# Loops that have connected and are not yet accepted: a person starts one, and perhaps another by mistake.
MAX_WAITING: Final = 8
_CREDENTIALS: Final = struct.Struct("3i")  # process, user, group
ANOTHER: Final = (
    "another loop is attached to this node: one trains at a time. To train with two, give this one a folder of its "
    "own: NoLoCo(options=['--home', FOLDER])"
)


class ScriptDoor:
    """The loop that is attached, or waits to be; made by `open_script_door`."""

    def __init__(self) -> None:
        self._waiting: Trainer | None = None
        self._newest: socket.socket | None = None  # the connection of the loop that came last
        self._came = trio.Event()
        self._is_attached = False
        self.dismissal = ""
        """Why this node trains no more; empty while it does."""
        self.pid: int | None = None
        """Process id of the loop that came last, where the system gives it; 0: one of another container."""

    @property
    def has_loop(self) -> bool:
        """True if a loop waits, or is attached; not if it has ended while it waited."""
        if self._waiting is None or self._newest is None:
            return self._is_attached
        try:
            return bool(self._newest.recv(1, socket.MSG_PEEK))
        except BlockingIOError:  # it says nothing yet, and is there
            return True
        except OSError:
            return False

    async def wait(self) -> None:
        """Wait until a loop is there."""
        await self._came.wait()

    async def dismiss(self, reason: str) -> None:
        """Dismiss the loop that waits, and all later ones."""
        self.dismissal = self.dismissal or reason
        if (waiting := self._take()) is not None:
            await waiting.stop(messages.Dismiss(self.dismissal, is_over=True))

    @contextlib.asynccontextmanager
    async def open_trainer(self, command: messages.Prepare) -> AsyncIterator[Trainer]:
        """Prepare the waiting loop, and stop it on the way out. Raises `TrainerError`."""
        trainer = self._take()
        assert trainer is not None, "a loop is waited for before"
        with contextlib.ExitStack() as held:
            try:
                shared = [held.enter_context(open_shared_memory(name)) for name in SHARED]
            except OSError as error:
                await trainer.stop(messages.Dismiss(f"the node has no memory to share: {error}"))
                raise TrainerError(f"there is no memory to share: {error}", "detached") from error
            self._is_attached = True
            try:
                await trainer.prepare(command, [place_for_others(each) for each in shared])
                yield trainer
            finally:
                self._is_attached = False
                await trainer.stop(messages.Dismiss(self.dismissal, is_over=True) if self.dismissal else STOP)
                trainer.close()

    async def let_in(self, connection: trio.SocketStream) -> None:
        """Take in a loop that has connected, or dismiss it."""
        kept = socket.socket(fileno=connection.socket.detach())  # the connection itself is closed after this call
        connection = trio.SocketStream(trio.socket.from_stdlib_socket(kept))
        trainer = Trainer(connection)
        if self.dismissal:
            await trainer.stop(messages.Dismiss(self.dismissal, is_over=True))
        elif self.has_loop:
            await trainer.stop(messages.Dismiss(ANOTHER))
        else:
            gone, self._waiting, self._newest = self._waiting, trainer, kept
            if hasattr(socket, "SO_PEERCRED"):  # Linux has it
                credentials = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                self.pid = _CREDENTIALS.unpack(credentials)[0]
            self._came.set()
            if gone is not None:
                await gone.stop()

    async def close(self) -> None:
        """Close the connection of the loop that waits."""
        if (waiting := self._take()) is not None:
            await waiting.stop()

    def _take(self) -> Trainer | None:
        trainer, self._waiting, self._came = self._waiting, None, trio.Event()
        return trainer


def has_started(mark: Path, pid: int | None) -> bool:
    """Return whether a loop has started the node with this process id; ``mark``: `NodeSettings.started_by_loop`."""
    with contextlib.suppress(OSError):
        return str(pid) in mark.read_text().split()
    return False


@contextlib.asynccontextmanager
async def open_script_door(path: Path) -> AsyncIterator[ScriptDoor]:
    """Listen at ``path`` for loops of this node's owner; the caller holds the home's lock."""
    door = ScriptDoor()
    with bound_socket(path) as listener:
        try:
            async with open_service_nursery() as nursery:
                await nursery.start(serve_door, listener, door.let_in, MAX_WAITING)
                yield door
        finally:  # once no further loop is let in
            with trio.CancelScope(shield=True):  # it closes a socket, and waits for nothing
                await door.close()
