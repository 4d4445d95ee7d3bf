"""Giving way to other programs, and to one's own threads that matter more."""

from __future__ import annotations

import os
import sys
import threading

from .features import HAS_PRIORITIES


def lower_priority(niceness: int) -> None:
    """Of this process. On Windows it is said when the process starts (`farandole.node.base.system.children`)."""
    if sys.platform != "win32" and HAS_PRIORITIES:
        os.nice(niceness)


def lower_thread_priority(niceness: int) -> None:
    """Of this thread, on Linux: elsewhere a thread has none of its own that could be set so."""
    if sys.platform == "linux" and HAS_PRIORITIES:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
