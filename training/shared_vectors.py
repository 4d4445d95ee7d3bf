"""A replica's flat vectors in memory that all ranks on one machine map, each of which works on its own ranges.

`torch.distributed` cuts a parameter into rows (`Shard(0)`: FSDP2), so a rank's part of it is a contiguous range of the
canonical vector. A rank copies these ranges from and to its parameters, and encodes, decodes and steps the blocks of
the codec that begin in them: a block that straddles two ranks is the lower one's. The bytes of a contribution are those
of one process, whatever the number of ranks. No vector exists twice: a rank's slow weights and momentum are its ranges.

Rank 0 assembles the contribution for its node, and copies what arrives from there; the ranks' progress is in counters.
It also computes, in the order of one process, what must be the same to the bit: norms, sums for screening, the hash. A
checkpoint is written from the shared memory without gathering anything.

Between two orders no rank touches the vectors, except that it may still encode; it finishes that before any other work.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import mmap
import os
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from farandole.protocol.outer_rules import OuterConfig, OuterRules

from .codec import BLOCK, form_of, slices
from .errors import CodecError, TrainingError
from .local_parameters import LocalParameters
from .parameters import Layout
from .ranks import Order, Ranks
from .share import Assembly, Bytes, Progress, Share

PAGE: Final = 4096
# Vectors of an outer state in addition to its rule's: fast and slow weights, drift, received; of the contributor: as it
# was, as sent, and topk's two. One to spare.
_NUM_VECTORS: Final = 9
_TOKEN_BYTES: Final = 16
_MEMFD_NAME: Final = "farandole-vectors"
# While rank 0 waits for the last bytes of other ranks; they are milliseconds apart.
_LOOK_SECONDS: Final = 0.001
_FAILED: Final = -1

Range = tuple[int, int]
"""Where elements of a parameter lie in the flat vector: from, to."""


class VectorMemory:
    """Memory for the vectors of one replica; a page is touched only by the rank that uses it.

    The memory has no name once all ranks have mapped it: the kernel frees it with the last of them, kill -9 included.
    """

    def __init__(self, outer: OuterConfig, num_elements: int, num_ranks: int, place: str = "", token: str = "") -> None:
        """Create memory, or map that at ``place`` which starts with ``token``. Raises `OSError`."""
        form, largest = form_of(outer.codec, outer.topk), -(-num_elements // outer.fragments)
        num_vectors = _NUM_VECTORS + len(outer.vectors) + len(outer.own_vectors)
        sizes = [*[4 * num_elements] * num_vectors, *[form.size(largest)] * 2, 8 * num_ranks, 8 * num_ranks]
        self.size = PAGE + sum(_in_pages(size) for size in sizes)
        self.token = token or secrets.token_hex(_TOKEN_BYTES)
        descriptor, self.place = (_open(place), place) if place else _create()
        try:
            if not place:
                os.ftruncate(descriptor, self.size)
            elif os.fstat(descriptor).st_size != self.size:
                raise OSError("the shared memory has another size")
            self._memory = mmap.mmap(descriptor, self.size)
        except BaseException:  # for any exception: nothing else has the descriptor yet
            os.close(descriptor)
            raise
        self._descriptor: int | None = descriptor
        self._next = PAGE
        mark = self.token.encode()
        if not place:
            self._memory[: len(mark)] = mark
        elif self._memory[: len(mark)] != mark:
            self.close()
            raise OSError("the shared memory is another one")
        self.counters: npt.NDArray[np.int64] = self.take(8 * num_ranks).view(torch.int64).numpy()
        self.processes: npt.NDArray[np.int64] = self.take(8 * num_ranks).view(torch.int64).numpy()
        self.outgoing: Bytes = self.take(form.size(largest)).numpy()
        self.incoming: Bytes = self.take(form.size(largest)).numpy()

    def take(self, num_bytes: int) -> Tensor:
        """Return the next bytes (num_bytes,) uint8: the same in every rank that takes the same ones before."""
        start, self._next = self._next, self._next + _in_pages(num_bytes)
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=num_bytes, offset=start)

    def close(self) -> None:
        """Take the memory's name away; what has mapped it keeps it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
            if not self.place.startswith("/proc/"):
                with contextlib.suppress(OSError):
                    os.unlink(self.place)


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


def own_ranges(ranges: Sequence[Sequence[Range]], rank: int, num_elements: int) -> list[Range]:
    """Divide the flat vector among the ranks by the ranges that each has; return those of ``rank``, ascending.

    Where ranks have the same elements, they belong to the lowest one. Raises `TrainingError` if some are no rank's.
    """
    claims = sorted((start, each, stop) for each, of_rank in enumerate(ranges) for start, stop in of_rank)
    own: list[Range] = []
    covered = 0
    for start, each, stop in claims:
        if start > covered:
            break
        if stop > covered:
            if each == rank and own and own[-1][1] == covered:
                own[-1] = own[-1][0], stop
            elif each == rank:
                own.append((covered, stop))
            covered = stop
    if covered < num_elements:
        raise TrainingError("the ranks together lack a part of a parameter: each parameter must be sharded over all")
    return own


def pieces_of(ranges: Sequence[Range], part: slice) -> list[slice]:
    """Return the blocks of a part of the flat vector that begin in the ranges, as pieces relative to the part.

    A piece never crosses a boundary of `codec.slices`.
    """
    length = part.stop - part.start
    blocks: list[Range] = []
    for start, stop in ranges:
        start, stop = max(start - part.start, 0), min(stop - part.start, length)
        if start >= stop:
            continue
        first, last = -(-start // BLOCK) * BLOCK, min(-(-stop // BLOCK) * BLOCK, length)
        if first < last and blocks and blocks[-1][1] == first:
            blocks[-1] = blocks[-1][0], last
        elif first < last:
            blocks.append((first, last))
    cuts = [each.start for each in slices(length)]
    pieces = []
    for start, stop in blocks:
        inner = cuts[bisect.bisect_right(cuts, start) : bisect.bisect_left(cuts, stop)]
        edges = [start, *inner, stop]
        pieces += [slice(*edge) for edge in itertools.pairwise(edges)]
    return pieces


class SharedVectors(Share):
    """One rank's share. ``memory`` is of all ``ranks``; ``ranges`` are this one's."""

    def __init__(self, memory: VectorMemory, ranges: Sequence[Range], ranks: Ranks) -> None:
        self.memory = memory
        self._ranges = ranges
        self._ranks = ranks
        self._pieces: dict[tuple[int, int], list[slice]] = {}
        memory.processes[ranks.rank] = os.getpid()

    def empty(self, like: Tensor, num_elements: int) -> Tensor:
        """Return the next vector in the memory; ``like`` must be fp32 on the host."""
        return self.memory.take(4 * num_elements).view(torch.float32)

    def zeros(self, like: Tensor) -> Tensor:
        """Return a vector that is zero, as new memory is."""
        return self.empty(like, len(like))

    def copy(self, vector: Tensor) -> Tensor:
        """Return a vector that rank 0 fills."""
        copied = self.empty(vector, len(vector))
        return copied.copy_(vector) if self._ranks.is_leader else copied

    def pieces(self, part: slice, span: slice | None = None) -> Iterator[slice]:
        """Yield this rank's pieces."""
        key = part.start, part.stop
        if key not in self._pieces:
            self._pieces[key] = pieces_of(self._ranges, part)
        pieces = self._pieces[key]
        if span is not None:
            starts = [piece.start for piece in pieces]
            pieces = pieces[bisect.bisect_left(starts, span.start) : bisect.bisect_left(starts, span.stop)]
        return iter(pieces)

    def spans(self, parts: Sequence[slice]) -> Iterator[slice]:
        """Yield one span: each costs an order."""
        if parts:
            yield slice(parts[0].start, parts[-1].stop)

    def begin_encoding(self, fragment: int) -> None:
        """Have the other ranks freeze their contribution, and begin to encode it, as rank 0."""
        self.memory.counters[:] = 0
        self._ranks.tell(Order.ENCODE, fragment)

    def assemble(self, target: Tensor, progress: Progress) -> Assembly:
        """Assemble ``target`` in rank 0; the others encode their pieces, and have no target."""
        return SharedAssembly(self.memory, self._ranks.rank, target, progress)

    def begin_decoding(self, span: slice, encoded: Bytes, place: slice) -> Bytes:
        """Share the bytes that have arrived, as rank 0, and have all ranks decode their pieces."""
        if self._ranks.is_leader:
            self.memory.incoming[place] = encoded[place]
            self._ranks.tell(Order.DECODE, span.start, span.stop)
        return self.memory.incoming

    def end_decoding(self, *, has_failed: bool) -> bool:
        """Meet the other ranks."""
        return self._ranks.meet(has_failed)

    def begin_step(self, order: int, weights: Sequence[float], rates: float, *, is_late: bool) -> None:
        """Have all ranks step their pieces."""
        if self._ranks.is_leader:
            self._ranks.tell(Order.OUTER, order, is_late, rates, *weights)

    def end_step(self) -> None:
        """Meet the other ranks."""
        self._ranks.meet()


class SharedAssembly(Assembly):
    """A contribution that ranks encode in shared memory, each its own pieces; rank 0 copies them to ``target``."""

    def __init__(self, memory: VectorMemory, rank: int, target: Tensor, progress: Progress) -> None:
        super().__init__(torch.from_numpy(memory.outgoing[: len(target)]), progress)
        self._memory = memory
        self._rank = rank
        self._final = target
        self._num_final = 0
        self._lock = threading.Lock()

    def add(self, place: slice) -> None:
        """Publish this rank's progress; rank 0 collects what is final now."""
        self._publish(place.stop)
        if self._rank == 0:
            self._collect()

    def _publish(self, count: int) -> None:
        with self._lock:  # ARM may reorder the bytes and their count
            self._memory.counters[self._rank] = count

    def fail(self) -> None:
        """Notify rank 0, which waits for this rank's bytes."""
        self._publish(_FAILED)

    def seal(self) -> bytes:
        """Finish this rank's pieces; in rank 0, wait for the others and return the BLAKE3."""
        self._publish(len(self._final))
        while self._rank == 0 and not self._collect():
            self._require_processes()
            time.sleep(_LOOK_SECONDS)
        return super().seal()

    def _collect(self) -> bool:
        """Copy the leading bytes that all ranks have finished; return whether that is all."""
        with self._lock:
            count = int(self._memory.counters.min())
        if count == _FAILED:
            raise CodecError("a value to be sent is not finite, or too large")  # of another rank's pieces
        if count > self._num_final:
            place = slice(self._num_final, count)
            self._final[place] = self.target[place]
            self._num_final = count
            super().add(place)
        return count == len(self._final)

    def _require_processes(self) -> None:
        """Raise `TrainingError` if a rank is gone."""
        for rank, process in enumerate(self._memory.processes.tolist()):
            try:
                os.kill(process, 0)
            except ProcessLookupError:
                raise TrainingError(f"rank {rank} is lost") from None


class _Memory(msgspec.Struct, frozen=True):
    """What the other ranks need to map the memory."""

    outer: OuterRules
    shapes: dict[str, tuple[int, ...]]
    place: str
    token: str


@dataclass(frozen=True)
class RankVectors:
    """One rank's view of the vectors that ranks share."""

    outer: OuterConfig
    layout: Layout
    parameters: LocalParameters
    share: SharedVectors


def share_vectors(
    ranks: Ranks, module: nn.Module, parameters: Mapping[str, nn.Parameter], layout: Layout, outer: OuterConfig
) -> RankVectors | None:
    """Share the vectors with the other ranks, as rank 0; None if they are not all on this machine.

    ``parameters``: those of the layout, in its order; their names were sent by `Ranks.begin`.
    """
    if not ranks.are_many or sys.platform == "win32":  # whether a process is there is asked by a signal
        return None
    memory: VectorMemory | None = None
    with contextlib.suppress(OSError, ValueError):
        memory = VectorMemory(outer, layout.num_elements, ranks.num_ranks)
    place, token = ("", "") if memory is None else (memory.place, memory.token)
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    ranks.tell_bytes(Order.SHARE, msgspec.msgpack.encode(_Memory(cast("OuterRules", outer), shapes, place, token)))
    return _shared(ranks, module, parameters, layout, outer, memory)


def take_share(
    ranks: Ranks, module: nn.Module, parameters: Mapping[str, nn.Parameter], told: bytes
) -> RankVectors | None:
    """Take a share, as another rank; ``told`` came with `Order.SHARE`."""
    described = msgspec.msgpack.decode(told, type=_Memory)
    outer = described.outer
    layout = Layout(tuple(described.shapes), tuple(described.shapes.values()), outer.codec)
    memory: VectorMemory | None = None
    if described.place:
        with contextlib.suppress(OSError, ValueError):
            memory = VectorMemory(outer, layout.num_elements, ranks.num_ranks, described.place, described.token)
    return _shared(ranks, module, parameters, layout, outer, memory)


def _shared(
    ranks: Ranks,
    module: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    layout: Layout,
    outer: OuterConfig,
    memory: VectorMemory | None,
) -> RankVectors | None:
    """Share the memory if all ranks have mapped it."""
    is_apart = ranks.meet(memory is None)
    if memory is not None:
        memory.close()
    if is_apart or memory is None:
        return None
    local = LocalParameters(module, parameters, layout, ranks)
    ranges = own_ranges(ranks.gather(local.ranges), ranks.rank, layout.num_elements)
    return RankVectors(outer, layout, local, SharedVectors(memory, ranges, ranks))
