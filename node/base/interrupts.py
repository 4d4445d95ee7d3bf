"""Ctrl-C as the way to end a command."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Let Ctrl-C end the block as if it had come to its end. Works only in the main thread.

    Python drops a `KeyboardInterrupt` that is raised while it calls back an object's finaliser, or a weak reference's
    (each import has one). So the block gets an event as well, which it must check whenever it waits.
    """
    is_interrupted = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        is_interrupted.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield is_interrupted
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, before)
