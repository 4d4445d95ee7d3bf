"""What the C library does with memory that is freed."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from typing import Final

# mallopt(3)
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
# From so many bytes on, memory is a mapping of its own, which the system has back when it is freed. That is where glibc
# begins; but it learns from each that is freed to take the next from its heap, which small things that stay then keep
# from shrinking: a process that moves megabytes now and then grows for weeks.
MMAP_THRESHOLD: Final = 128 * 1024
# Heaps of threads: eight a core otherwise, each with what its own peaks have left.
MAX_ARENAS: Final = 2


# The largest temporary that a process which computes keeps for the next one; glibc takes no more for its threshold.
KEPT_BYTES: Final = 32 * 1024 * 1024
# Free memory at the end of the heap that such a process keeps.
KEPT_FREE_BYTES: Final = 1 << 30


def keep_memory() -> None:
    """Keep freed temporaries for the next ones: getting fresh pages from the system takes longer than filling them.

    For a process that computes the same again and again. Without glibc nothing changes.
    """
    _mallopt({_M_MMAP_THRESHOLD: KEPT_BYTES, _M_TRIM_THRESHOLD: KEPT_FREE_BYTES})


def give_memory_back() -> None:
    """For a process that lives long: it has what it uses, not what it once used. Without glibc nothing changes."""
    _mallopt({_M_MMAP_THRESHOLD: MMAP_THRESHOLD, _M_ARENA_MAX: MAX_ARENAS})


def _mallopt(options: dict[int, int]) -> None:
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):  # musl has no mallopt
        library = ctypes.CDLL(None)
        for option, value in options.items():
            library.mallopt(option, value)
