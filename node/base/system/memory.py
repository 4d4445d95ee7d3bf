"""Memory that two processes share: a file without a name, mapped by both.

Nothing can be left behind: the kernel frees it with its last user, kill -9 included. On Linux it is a memfd, and never
touches a disk.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Final, NamedTuple

COUNTER_BYTES: Final = 8
_COUNT_BITS: Final = 48  # a contribution has less than 2**44 bytes
MAX_EPOCHS: Final = 1 << (64 - _COUNT_BITS)
_MEMFD_NAME: Final = "farandole-"


@contextlib.contextmanager
def open_shared_memory(name: str) -> Iterator[int]:
    """Open an empty shared file, which a child process may inherit; yields its descriptor.

    `map_shared_memory` gives it its size. Raises `OSError`.
    """
    if sys.platform == "linux":
        descriptor = os.memfd_create(f"{_MEMFD_NAME}{name}")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def place_for_others(descriptor: int) -> str:
    """Return the path at which another process of this user can open a descriptor of this one. Only Linux has it."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


class Count(NamedTuple):
    """The content of a `SharedCounter`."""

    epoch: int
    value: int


class SharedCounter:
    """A number in the last eight bytes of shared memory: how many of the first ones are ready. One process stores it.

    It is aligned and stored in one piece: a reader sees the old number or the new one, not a mixture. An *epoch* (of 16
    bits) is stored with it: it names what is counted, so that an old number is not taken for a new one.
    The bytes that it counts are written before it, and read after it, on every processor: ARM may reorder the two
    accesses, so both ends pass a barrier between them.
    """

    def __init__(self, memory: mmap.mmap | bytearray | memoryview) -> None:
        """``memory``: writable, of `counted_size` bytes."""
        self._word = memoryview(memory)[-COUNTER_BYTES:].cast("Q")
        self._lock = threading.Lock()

    def store(self, epoch: int, count: int) -> None:
        """Publish a count of an epoch."""
        self._pass_barrier()
        self._word[0] = (epoch % MAX_EPOCHS) << _COUNT_BITS | count

    def read(self) -> Count:
        """Return the count that was published last, and its epoch."""
        word = self._word[0]
        self._pass_barrier()
        return Count(word >> _COUNT_BITS, word & ((1 << _COUNT_BITS) - 1))

    def _pass_barrier(self) -> None:
        """Order the accesses before and after: a lock is released (C11 release), then taken (C11 acquire)."""
        for _ in range(2):
            with self._lock:
                pass

    def count_of(self, epoch: int) -> int:
        """Return the count of this epoch; 0 if another epoch's count is stored."""
        stored, count = self.read()
        return count if stored == epoch % MAX_EPOCHS else 0


def counted_size(size: int) -> int:
    """Return the size of memory with ``size`` bytes and a `SharedCounter`."""
    return -(-size // COUNTER_BYTES) * COUNTER_BYTES + COUNTER_BYTES


def map_shared_memory(place: int | str, size: int) -> mmap.mmap:
    """Map ``size`` bytes of a descriptor or a `place_for_others`, growing it if it is smaller; at least one page.

    Raises `OSError`.
    """
    if isinstance(place, int):
        return _map(place, size)
    if not os.readlink(place).startswith(f"/memfd:{_MEMFD_NAME}"):
        raise FileNotFoundError(f"{place} is no shared memory: this process and the node see different processes")
    descriptor = os.open(place, os.O_RDWR)
    try:
        return _map(descriptor, size)
    finally:
        os.close(descriptor)


def _map(descriptor: int, size: int) -> mmap.mmap:
    size = max(size, mmap.PAGESIZE)
    if os.fstat(descriptor).st_size < size:
        os.ftruncate(descriptor, size)
    return mmap.mmap(descriptor, size)
