"""Memory that the ranks on one machine share: flat vectors, the bytes of an exchange, and the ranks' progress."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import sys
import tempfile
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from farandole.protocol.run.outer_rules import OuterConfig

from ..outer.codec import form_of
from ..outer.share import Bytes
from .ranges import Range, without

PAGE: Final = mmap.PAGESIZE
# Vectors of an outer state in addition to its rule's: fast and slow weights, drift, received; of the contributor: as it
# was, as sent, and topk's two. One to spare.
_NUM_VECTORS: Final = 9
_TOKEN_BYTES: Final = 16
_MEMFD_NAME: Final = "farandole-vectors"


class VectorMemory:
    """Memory for the vectors of one replica; a page is touched only by the rank that uses it.

    On several machines each has such memory, of which it touches what its ranks work on. The memory has no name once
    all ranks have mapped it: the kernel frees it with the last of them, kill -9 included.
    """

    def __init__(self, outer: OuterConfig, num_elements: int, num_ranks: int, place: str = "") -> None:
        """Create memory, or map that at ``place``. Raises `OSError`."""
        form, largest = form_of(outer.codec, outer.topk), -(-num_elements // outer.fragments)
        num_vectors = _NUM_VECTORS + len(outer.vectors) + len(outer.own_vectors)
        sizes = [*[4 * num_elements] * num_vectors, *[form.size(largest)] * 2, 8 * num_ranks, 8 * num_ranks]
        size = PAGE + sum(_in_pages(each) for each in sizes)
        descriptor, self.place = (_open(place), place) if place else _create()
        try:
            if not place:
                os.ftruncate(descriptor, size)
            elif os.fstat(descriptor).st_size != size:
                raise OSError("the shared memory has another size")
            self._memory = mmap.mmap(descriptor, size)
        except BaseException:  # for any exception: nothing else has the descriptor yet
            os.close(descriptor)
            raise
        self._descriptor: int | None = descriptor
        self._next = 0
        self._address = self.take(PAGE).data_ptr()
        self.counters: npt.NDArray[np.int64] = self.take(8 * num_ranks).view(torch.int64).numpy()
        self.processes: npt.NDArray[np.int64] = self.take(8 * num_ranks).view(torch.int64).numpy()
        self.outgoing: Bytes = self.take(form.size(largest)).numpy()
        self.incoming: Bytes = self.take(form.size(largest)).numpy()

    def take(self, num_bytes: int) -> Tensor:
        """Return the next bytes (num_bytes,) uint8: the same in every rank that takes the same ones before."""
        start, self._next = self._next, self._next + _in_pages(num_bytes)
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=num_bytes, offset=start)

    def forget(self, vector: Tensor, kept: Iterable[Range]) -> None:
        """Give the system the pages of a vector (n,) of this memory without elements of the ranges ``kept``, ascending.

        The vector is zero there afterwards, or as it was: systems other than Linux keep the pages, and some sandboxes.
        """
        if sys.platform != "linux":
            return
        place = vector.data_ptr() - self._address
        for start, stop in without(len(vector), kept):
            first, last = _in_pages(place + 4 * start), (place + 4 * stop) // PAGE * PAGE
            if first < last:
                with contextlib.suppress(OSError):
                    self._memory.madvise(mmap.MADV_REMOVE, first, last - first)

    def close(self) -> None:
        """Take the memory's name away; what has mapped it keeps it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            _remove(descriptor, self.place)


class Mark:
    """Something that the other ranks on this machine can see, and those on other machines cannot."""

    def __init__(self) -> None:
        self._descriptor, self._place = _create()
        token = secrets.token_bytes(_TOKEN_BYTES)
        os.write(self._descriptor, token)
        self.told = f"{token.hex()} {self._place}"
        """What others need to look for it."""

    def close(self) -> None:
        """Remove the mark."""
        _remove(self._descriptor, self._place)


def sees_mark(told: str) -> bool:
    """Return whether another rank's mark is visible here."""
    if sys.platform == "win32":  # `SharedVectors` asks by a signal whether a process is there, which would end it
        return False
    token, _, place = told.partition(" ")
    with contextlib.suppress(OSError), open(_open(place), "rb") as file:
        return file.read() == bytes.fromhex(token)
    return False


def _remove(descriptor: int, place: str) -> None:
    os.close(descriptor)
    if not place.startswith("/proc/"):
        with contextlib.suppress(OSError):
            os.unlink(place)


def _in_pages(num_bytes: int) -> int:
    return -(-max(num_bytes, 1) // PAGE) * PAGE


def _create() -> tuple[int, str]:
    """Return the descriptor of a new file in memory, and the path by which other processes of the user open it."""
    if sys.platform == "linux":
        descriptor = os.memfd_create(_MEMFD_NAME)
        return descriptor, f"/proc/{os.getpid()}/fd/{descriptor}"
    return tempfile.mkstemp(prefix=_MEMFD_NAME)


def _open(place: str) -> int:
    if place.startswith("/proc/") and not os.readlink(place).startswith(f"/memfd:{_MEMFD_NAME}"):
        raise FileNotFoundError(f"{place} is no shared memory")
    return os.open(place, os.O_RDWR)
