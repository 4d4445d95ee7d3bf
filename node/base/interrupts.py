"""Ctrl-C as the way to end a command."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Protocol


class Ending(Protocol):
    """Whether a loop must end: an `Interruption`, or a `threading.Event` that another thread sets."""

    def is_set(self) -> bool:
        """Return whether it must."""

    def wait(self, seconds: float, /) -> bool:
        """Wait for so many seconds, or until it must; return whether it must."""


class Interruption:
    """Whether Ctrl-C has come, for a loop that asks; made by `interruptible` and `gently_interruptible`.

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
def interruptible() -> Iterator[Interruption]:
    """Let Ctrl-C end the block as if it had come to its end. Works only in the main thread.

    Python drops a `KeyboardInterrupt` that is raised while it calls back an object's finaliser, or a weak reference's
    (each import has one). So the block must also ask, whenever it waits.
    """
    with contextlib.suppress(KeyboardInterrupt), _noting([signal.SIGINT], num_gentle=0) as interruption:
        yield interruption


@contextlib.contextmanager
def gently_interruptible() -> Iterator[Interruption]:
    """Let the first Ctrl-C, or SIGTERM, do no more than end a wait; another one raises as usual.

    For a block that must finish what it is at. Works only in the main thread.
    """
    with _noting([signal.SIGINT, signal.SIGTERM], num_gentle=1) as interruption:
        yield interruption


@contextlib.contextmanager
def _noting(numbers: Sequence[int], num_gentle: int) -> Iterator[Interruption]:
    """Note these signals within the block; those after the first ``num_gentle`` raise `KeyboardInterrupt`."""
    woken, waking = socket.socketpair()
    waking.setblocking(False)
    num_signals = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal num_signals
        num_signals += 1
        with contextlib.suppress(BlockingIOError):  # it is full: it has been noted
            waking.send(b"!")
        if num_signals > num_gentle:
            raise KeyboardInterrupt

    with woken, waking:
        before = {number: signal.signal(number, note) for number in numbers}
        try:
            yield Interruption(woken)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
