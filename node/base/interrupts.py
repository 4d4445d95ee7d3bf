"""Ctrl-C as the way to end a command."""

from __future__ import annotations

import contextlib
import signal
import time
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

    def __init__(self) -> None:
        self._has_come = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """Remember a signal, and raise `KeyboardInterrupt`."""
        self._has_come = True
        raise KeyboardInterrupt

    def is_set(self) -> bool:
        """Return whether Ctrl-C has come."""
        return self._has_come

    def wait(self, seconds: float, /) -> bool:
        """Wait for so many seconds, unless Ctrl-C has come; return whether it has."""
        if not self._has_come:
            time.sleep(seconds)
        return self._has_come


@contextlib.contextmanager
def interruptible() -> Iterator[Interruption]:
    """Let Ctrl-C end the block as if it had come to its end. Works only in the main thread.

    Python drops a `KeyboardInterrupt` that is raised while it calls back an object's finaliser, or a weak reference's
    (each import has one). So the block must also ask, whenever it waits.
    """
    interruption = Interruption()
    before = signal.signal(signal.SIGINT, interruption.note)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield interruption
    finally:
        signal.signal(signal.SIGINT, before)
