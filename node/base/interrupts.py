"""Ctrl-C as the way to end a command."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
from collections.abc import Iterator
from types import FrameType
from typing import Protocol


class Ending(Protocol):
    """Whether a loop must end: an `Interruption`, or a `threading.Event` that another thread sets."""

    def is_set(self) -> bool:
        """Return whether it must."""

    def wait(self, seconds: float, /) -> bool:
        """Wait for so many seconds, or until it must; return whether it must."""


class Interruption:
    """Whether Ctrl-C has come, for a loop that asks; made by `interruptible`.

    It is no `threading.Event`: a signal's handler runs in the main thread, between any two of its instructions, and may
    not wait for a lock that this thread holds at that moment.
    """

    def __init__(self, woken: socket.socket) -> None:
        """``woken``: can be read from when Ctrl-C has come."""
        self._woken = woken

    def is_set(self) -> bool:
        """Return whether Ctrl-C has come."""
        return self.wait(0.0)

    def wait(self, seconds: float, /) -> bool:
        """Wait for so many seconds, or until Ctrl-C; return whether it has come."""
        readable, _, _ = select.select([self._woken], [], [], seconds)
        return bool(readable)


@contextlib.contextmanager
def interruptible(*, is_gentle: bool = False) -> Iterator[Interruption]:
    """Let Ctrl-C end the block as if it had come to its end. Works only in the main thread.

    Python drops a `KeyboardInterrupt` that is raised while it calls back an object's finaliser, or a weak reference's
    (each import has one). So the block must also ask, whenever it waits. ``is_gentle``: the first Ctrl-C, or SIGTERM,
    does no more than end a wait, for a block that must finish what it is at; another one raises as usual.
    """
    numbers = (signal.SIGINT, signal.SIGTERM) if is_gentle else (signal.SIGINT,)
    woken, waking = socket.socketpair()
    waking.setblocking(False)
    num_signals = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal num_signals
        num_signals += 1
        with contextlib.suppress(BlockingIOError):  # it is full: it has been noted
            waking.send(b"!")
        if num_signals > is_gentle:
            raise KeyboardInterrupt

    with woken, waking:
        before = {number: signal.signal(number, note) for number in numbers}
        try:
            with contextlib.nullcontext() if is_gentle else contextlib.suppress(KeyboardInterrupt):
                yield Interruption(woken)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
