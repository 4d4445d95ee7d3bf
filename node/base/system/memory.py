"""Memory that two processes share: a file, mapped by both.

For a child it is a file without a name, which cannot be left behind: the kernel frees it with its last user, kill -9
included. On Linux it is a memfd and never touches a disk. For another process it has a name in a folder of its own on
macOS; files of a killed process are removed when the next one begins.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from .files import open_private

COUNTER_BYTES: Final = 8
_COUNT_BITS: Final = 48  # a contribution has less than 2**44 bytes
MAX_EPOCHS: Final = 1 << (64 - _COUNT_BITS)
_SUFFIX: Final = ".shared"
HAS_MEMFD: Final = hasattr(os, "memfd_create")
"""Files without a name, in memory."""
_MEMFD_NAME: Final = "farandole-"


@dataclass(frozen=True)
class SharedFile:
    """An empty shared file; `map_shared_memory` gives it its size."""

    descriptor: int
    place: int | str
    """For another process: the descriptor that it inherits, or the path."""


@contextlib.contextmanager
def open_shared_memory(name: str, folder: Path, *, is_inherited: bool = True) -> Iterator[SharedFile]:
    """A shared file for a child process or, where not ``is_inherited``, for another process of the same user.

    ``folder``: private folder for the file if it must have a name; made if needed. Raises `OSError`.
    """
    path = None
    if sys.platform == "linux" and HAS_MEMFD:
        descriptor = os.memfd_create(f"{_MEMFD_NAME}{name}")
        place: int | str = descriptor if is_inherited else f"/proc/{os.getpid()}/fd/{descriptor}"
    elif is_inherited:
        with tempfile.TemporaryFile() as file:
            descriptor = place = os.dup(file.fileno())
    else:
        path = folder / f"{name}-{secrets.token_hex(8)}{_SUFFIX}"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, place = open_private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL), str(path)
    try:
        yield SharedFile(descriptor, place)
    finally:
        os.close(descriptor)
        if path is not None:
            path.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove files of a killed process from the folder; the caller knows that no other process uses it."""
    for path in folder.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def open_shared(place: str) -> int:
    """Open the file that `SharedFile.place` names, as a process reads it from its command line. Raises `OSError`."""
    if place.startswith("/proc/") and not os.readlink(place).startswith(f"/memfd:{_MEMFD_NAME}"):
        raise FileNotFoundError(f"{place} is no shared memory: this process and the node see different processes")
    return int(place) if place.isdigit() else open_private(Path(place), os.O_RDWR)


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
    """Map ``size`` bytes of what a `SharedFile` names, growing it if it is smaller; at least one page. `OSError`."""
    if isinstance(place, int):
        return _map(place, size)
    descriptor = open_shared(place)
    try:
        return _map(descriptor, size)
    finally:
        os.close(descriptor)


def _map(descriptor: int, size: int) -> mmap.mmap:
    size = max(size, mmap.PAGESIZE)
    if os.fstat(descriptor).st_size < size:
        os.ftruncate(descriptor, size)
    return mmap.mmap(descriptor, size)
