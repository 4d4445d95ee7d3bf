"""How a process uses its machine: freed memory, the garbage collector, its priority."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import threading
from collections.abc import Iterator
from typing import Final

# mallopt(3)
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
# From this size on, an allocation is a mapping of its own, which returns to the system when it is freed. It is glibc's
# initial threshold; but glibc raises it with each freed mapping and takes the next from its heap, and small allocations
# that stay keep the heap from shrinking: a process that moves megabytes now and then grows for weeks.
MMAP_THRESHOLD: Final = 128 * 1024
# Heaps of threads; glibc's default is eight per core, and each keeps the memory of its own peaks.
MAX_ARENAS: Final = 2
# The largest temporary that a process which computes keeps for the next one; glibc takes no more for its threshold.
KEPT_BYTES: Final = 32 * 1024 * 1024
# Free memory at the end of the heap that such a process keeps.
KEPT_FREE_BYTES: Final = 1 << 30

# Of a trainer, and of `farandole sample`, which may run next to one: below interactive programs, and below the mesh
# process, whose answers others wait for. If trainer and sample share one core, each gets half of it.
TRAINING_NICENESS: Final = 5
# Of writing checkpoints. Training goes first: under contention it gets three times as much. At the lowest priority
# 411 MB took 77 s on a machine under load, longer than a leaving node can wait.
SAVING_NICENESS: Final = 10
# For tests, whose trainers would yield to other tests: keep the priority. The underscore marks that it is no setting.
KEEP_PRIORITY_VARIABLE: Final = "_FARANDOLE_KEEP_PRIORITY"


def keep_memory() -> None:
    """Keep freed temporaries for the next ones: getting fresh pages from the system takes longer than filling them.

    This is for a process that repeats the same computation. Without glibc nothing changes.
    """
    _mallopt({_M_MMAP_THRESHOLD: KEPT_BYTES, _M_TRIM_THRESHOLD: KEPT_FREE_BYTES})


def give_memory_back() -> None:
    """Make a long-lived process return freed memory, so that it holds what it uses. Without glibc nothing changes."""
    _mallopt({_M_MMAP_THRESHOLD: MMAP_THRESHOLD, _M_ARENA_MAX: MAX_ARENAS})


def give_free_memory_back() -> None:
    """Return all free memory once, also between allocations that stay. Without glibc nothing is done."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def _mallopt(options: dict[int, int]) -> None:
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):  # musl has no mallopt
        library = ctypes.CDLL(None)
        for option, value in options.items():
            library.mallopt(option, value)


@contextlib.contextmanager
def importing_for_good() -> Iterator[None]:
    """Freeze the objects of imports within the block: the garbage collector never traverses them.

    Importing torch makes 170,000 objects that stay. The collector traverses them again and again as their number grows,
    and at each full collection later: a trainer that avoids this has imported after 1.3 s, not 2.0.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def lower_priority(niceness: int) -> None:
    """Lower this process's priority."""
    if not os.environ.get(KEEP_PRIORITY_VARIABLE):
        os.nice(niceness)


def lower_thread_priority(niceness: int) -> None:
    """Lower this thread's priority on Linux: elsewhere a thread has no own priority that can be set like this."""
    if sys.platform == "linux" and not os.environ.get(KEEP_PRIORITY_VARIABLE):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
