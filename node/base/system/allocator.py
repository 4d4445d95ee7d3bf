"""What the C library does with memory that is freed."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from typing import Final

# mallopt(3)
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
# From so many bytes on, memory is a mapping of its own, which the system has back when it is freed. That is where glibc
# begins; but it learns from each that is freed to take the next from its heap, which small things that stay then keep
# from shrinking: a process that moves megabytes now and then grows for weeks.
MMAP_THRESHOLD: Final = 128 * 1024
# Heaps of threads: eight a core otherwise, each with what its own peaks have left.
MAX_ARENAS: Final = 2


def give_memory_back() -> None:
    """For a process that lives long: it has what it uses, not what it once used. Without glibc nothing changes."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):  # musl has no mallopt
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD)
        library.mallopt(_M_ARENA_MAX, MAX_ARENAS)
