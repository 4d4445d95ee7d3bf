"""Ctrl-C as the way to end a command."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
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


class Interruption:
    """Whether Ctrl-C has come, for a loop that asks; made by `gently_interruptible`.

    It is no `threading.Event`: a signal's handler runs in the main thread, between any two of its instructions, and may
    not wait for a lock that this thread holds at that moment.
    """

    def __init__(self, woken: socket.socket) -> None:
        """``woken``: can be read from when Ctrl-C has come."""
        self._woken = woken

    def wait(self, seconds: float) -> bool:
        """Wait for so many seconds, or until Ctrl-C; return whether it has come."""
        readable, _, _ = select.select([self._woken], [], [], seconds)
        return bool(readable)


@contextlib.contextmanager
def gently_interruptible() -> Iterator[Interruption]:
    """Let the first Ctrl-C, or SIGTERM, do no more than end a wait; another one raises as usual.

    For a block that must finish what it is at. Works only in the main thread.
    """
    woken, waking = socket.socketpair()
    num_signals = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals > 1:
            raise KeyboardInterrupt
        waking.send(b"!")

    with woken, waking:
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield Interruption(woken)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
