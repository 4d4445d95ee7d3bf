"""What this process does of the work on a replica's flat vectors: all of it, or a part.

Usually one process has the vectors. If a user's loop runs in several processes (`farandole.training.cluster.ranks`),
those on one machine map the same memory, and each process encodes, decodes and steps the ranges of its own shards
(`farandole.training.cluster.shared_vectors`). One rank of each machine does what is left: sums for norms and for the
screening. On one machine that is rank 0, which adds up in the order of one process, so that the sums are the same to
the bit.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from torch import Tensor

from .codec import slices
from .copying import Copier, Wait

Bytes = npt.NDArray[np.uint8]
Progress = Callable[[int], None]
"""Called with the number of leading bytes that are final."""

ALONE: Final = 0
OWN_FIRST: Final = 1
OWN_LAST: Final = 2


class HostWork(enum.IntEnum):
    """Work that each machine does on its part of the vectors when rank 0 does it, with the numbers that it needs."""

    DISTANCE = 0
    ALIGNMENT = 1
    SCREENING = 2
    LIMIT_MOMENTUM = 3
    FILL = 4
    SWAP = 5
    GATHER = 6
    SPREAD = 7


class Assembly:
    """The bytes of a contribution on their way to the partner: their hash, and how many of them are final."""

    def __init__(self, target: Tensor, progress: Progress) -> None:
        """Begin; ``target``: where this process encodes to, (bytes,) uint8."""
        self.target = target
        self._progress = progress
        self._digest = blake3()

    def add(self, place: slice) -> None:
        """Note that this process has encoded a piece, after all of its earlier ones."""
        self._digest.update(self.target[place].numpy().data)
        self._progress(place.stop)

    def fail(self) -> None:
        """Note that this process cannot encode its pieces."""

    def seal(self) -> bytes:
        """Wait until all is encoded; return the BLAKE3."""
        return self._digest.digest()


class Share:
    """All of the work, and vectors of this process's own."""

    def empty(self, like: Tensor, num_elements: int) -> Tensor:
        """Return a vector (n,) of the dtype and on the device of ``like``."""
        return like.new_empty(num_elements)

    def zeros(self, like: Tensor) -> Tensor:
        """Return zeros (n,)."""
        return like.new_zeros(len(like))

    def copy(self, vector: Tensor) -> Tensor:
        """Return a copy of a vector (n,)."""
        return vector.clone()

    def pieces(self, part: slice, span: slice | None = None) -> Iterator[slice]:
        """Cut the part of the flat vectors that a round exchanges; yields this process's pieces, relative to the part.

        Each consists of whole blocks of the codec, except at the end of the part. With ``span``, a result of `spans`,
        only the pieces in it are yielded.
        """
        return slices(part.stop - part.start) if span is None else slices(span.stop, span.start)

    def summed(self, part: slice, span: slice | None = None) -> Iterator[slice]:
        """Yield the pieces whose sums this process adds up, or that it changes for all processes that share them.

        As for `pieces`. Usually this is all of the part; on several machines, each has some.
        """
        return slices(part.stop - part.start) if span is None else slices(span.stop, span.start)

    def spans(self, parts: Sequence[slice]) -> Iterator[slice]:
        """Yield the spans in which consecutive parts are decoded: one after another, so that they stay in a cache."""
        yield from parts

    def assemble(self, part: slice, target: Tensor, progress: Progress) -> Assembly:
        """Return the assembly of a part's contribution in ``target`` (bytes,) uint8."""
        return Assembly(target, progress)

    def made(self, like: Tensor, make: Callable[[slice], Tensor]) -> Tensor:
        """Return a vector as ``like`` (n,), made piece by piece."""
        vector = self.empty(like, len(like))
        for piece in slices(len(like)):
            vector[piece] = make(piece)
        return vector

    def begin_decoding(self, part: slice, span: slice, encoded: Bytes, place: slice) -> Bytes:
        """Begin to decode a span of a part's contribution ``encoded`` (bytes,), of which ``place`` is the span's.

        Returns the encoded contribution as this process should read it.
        """
        return encoded

    def end_decoding(self, *, has_failed: bool) -> bool:
        """End what `begin_decoding` has begun; return whether it failed in any process."""
        return has_failed

    def begin_step(self, order: int, weights: Sequence[float], rates: float, *, is_late: bool) -> None:
        """Begin an outer step.

        ``order``: `ALONE`, or `OWN_FIRST` or `OWN_LAST` by the order in which contributions are added.
        """

    def end_step(self) -> None:
        """Wait until the outer step is taken in all processes."""

    def tell_hosts(self, work: HostWork, *numbers: float) -> None:
        """Have the other machines do the same work; called in rank 0 before it, and without effect in other ranks."""

    def add_up(self, *sums: float) -> Sequence[float]:
        """Return the sums over all machines, each of which calls this at the same time."""
        return sums

    def keep(self, copier: Copier, vector: Tensor, copy: Tensor) -> Wait:
        """Copy all of a vector (n,) to ``copy`` (n,); see `Copier.keep`."""
        return copier.keep(vector, copy)

    def gather(self, vector: Tensor) -> None:
        """Make a vector (n,) whole in rank 0, until the next contribution."""

    def spread(self, vectors: Mapping[str, Tensor]) -> None:
        """Give all machines their parts of vectors (n,) that rank 0 has written."""
