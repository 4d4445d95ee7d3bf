"""Lower priorities, so that other programs and more important threads come first."""

from __future__ import annotations

import os
import sys
import threading
from typing import Final

from .features import HAS_PRIORITIES

# Of a trainer, and of `farandole sample`, which may run next to one: below interactive programs, and below the mesh
# process, whose answers others wait for. If trainer and sample share one core, each gets half of it.
TRAINING_NICENESS: Final = 5
# Of writing checkpoints. Training goes first: under contention it gets three times as much. At the lowest priority
# 411 MB took 77 s on a machine under load, longer than a leaving node can wait.
SAVING_NICENESS: Final = 10


def lower_priority(niceness: int) -> None:
    """Lower this process's priority. On Windows it is set when it starts (`farandole.node.base.system.children`)."""
    if sys.platform != "win32" and HAS_PRIORITIES:
        os.nice(niceness)


def lower_thread_priority(niceness: int) -> None:
    """Lower this thread's priority on Linux: elsewhere a thread has no own priority that can be set like this."""
    if sys.platform == "linux" and HAS_PRIORITIES:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
