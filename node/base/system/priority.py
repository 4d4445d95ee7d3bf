"""Lower priorities, so that other programs and more important threads come first."""

from __future__ import annotations

import os
import sys
import threading

from .features import HAS_PRIORITIES


def lower_priority(niceness: int) -> None:
    """Lower this process's priority. On Windows it is set when it starts (`farandole.node.base.system.children`)."""
    if sys.platform != "win32" and HAS_PRIORITIES:
        os.nice(niceness)


def lower_thread_priority(niceness: int) -> None:
    """Lower this thread's priority on Linux: elsewhere a thread has no own priority that can be set like this."""
    if sys.platform == "linux" and HAS_PRIORITIES:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
