"""A replica's flat vectors in several ranks, each of which works on its own ranges.

`torch.distributed` cuts a parameter into rows (`Shard(0)`: FSDP2), so a rank's part of it is a contiguous range of the
canonical vector. A rank copies these ranges from and to its parameters, and encodes, decodes and steps the blocks of
the codec that begin in them: a block that straddles two ranks is the lower one's. The bytes of a contribution are those
of one process, whatever the number of ranks.

The ranks on one machine map the same memory, so no vector exists twice: a rank's slow weights and momentum are its
ranges. Each machine has memory of its own for vectors of the full length, of which it uses the pages that its ranks
work on. What crosses machines: the encoded bytes, to rank 0's machine and from there; the elements at the edges of
ranges, where a block straddles two machines; the parameters of which several machines have a copy; and what rank 0
saves and loads.

Rank 0 assembles the contribution for its node, and copies what arrives from there; the ranks' progress is in counters.
On one machine it also computes, in the order of one process, what must be the same to the bit: norms, and sums for
screening. On several, the lowest rank of each adds up its part, and the parts are added up.

Between two orders no rank touches the vectors, except that it may still encode; it finishes that before any other work.
"""

from __future__ import annotations

import bisect
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, cast

import msgspec
import torch
from torch import Tensor, nn

from farandole.protocol.run.outer_rules import OuterConfig, OuterRules
from farandole.protocol.run.screening_rules import ScreeningConfig, ScreeningRules

from ..base.errors import CodecError, TrainingError
from ..base.parameters import Layout
from ..outer.codec import Form, bytes_of, form_of, slices
from ..outer.copying import Copier, Wait
from ..outer.share import Assembly, Bytes, HostWork, Progress, Share
from .hosts import Plan, plan
from .local_parameters import LocalParameters
from .ranges import Range, divided, merged, pieces_of
from .ranks import Order, Ranks
from .vector_memory import VectorMemory

# While a rank waits for the last bytes of others; they are milliseconds apart.
_LOOK_SECONDS: Final = 0.001
# In place of a number of bytes.
_FAILED: Final = -1
_LOST: Final = -2
# Slices whose bytes one machine sends to another at once.
_WINDOW: Final = 16


@dataclass(frozen=True)
class Cut:
    """What each rank has and needs of a flat vector, by rank."""

    layout: Layout
    num_fragments: int
    copied: Sequence[Sequence[Range]]
    """The elements that a rank copies from its parameters."""
    needed: Sequence[Sequence[Range]]
    """The elements that it copies to its parameters."""


class _Machines:
    """What each machine has of a vector, and the transfers after which it has what it needs."""

    def __init__(self, cut: Cut, own: Sequence[Sequence[Range]], members: Sequence[Sequence[int]]) -> None:
        of_machines = [merged(one for rank in ranks for one in own[rank]) for ranks in members]
        needed = [merged(one for rank in ranks for one in cut.needed[rank]) for ranks in members]
        num_elements = cut.layout.num_elements
        parts = [cut.layout.fragment(index, cut.num_fragments) for index in range(cut.num_fragments)]
        self.ranges = of_machines
        """The elements that a machine's ranks copy from their parameters."""
        self.blocks = [
            merged((part.start + each.start, part.start + each.stop) for part in parts for each in pieces_of(has, part))
            for has in of_machines
        ]
        """The blocks of the fragments that begin there: what a machine works on."""
        whole, nothing = [(0, num_elements)], [list[Range]()] * (len(members) - 1)
        self.after_read = plan(of_machines, self.blocks)
        self.before_write = plan(self.blocks, needed)
        self.to_gather = plan(self.blocks, [whole, *nothing])
        self.to_spread = plan([whole, *nothing], self.blocks)


class SharedVectors(Share):
    """One rank's share of vectors in ``memory``, which the ranks on this machine map."""

    def __init__(self, memory: VectorMemory, cut: Cut, form: Form, ranks: Ranks) -> None:
        self.memory = memory
        self.form = form
        own = divided(cut.copied, cut.layout.num_elements)
        self._layout = cut.layout
        self._num_fragments = cut.num_fragments
        self._ranges = own[ranks.rank]
        self._ranks = ranks
        self._hosts = ranks.hosts
        self._machines = _Machines(cut, own, ranks.hosts.members)
        self._pieces: dict[tuple[int, int, int], list[slice]] = {}
        self._vectors: list[Tensor] = []
        self._arriving: Future[None] | None = None
        self._num_arrived = 0
        self._aside = ThreadPoolExecutor(1)
        memory.processes[ranks.rank] = os.getpid()

    # Memory

    def empty(self, like: Tensor, num_elements: int) -> Tensor:
        """Return the next vector in the memory; ``like`` must be fp32 on the host."""
        self._vectors.append(self.memory.take(4 * num_elements).view(torch.float32))
        return self._vectors[-1]

    def zeros(self, like: Tensor) -> Tensor:
        """Return a vector that is zero, as new memory is."""
        return self.empty(like, len(like))

    def copy(self, vector: Tensor) -> Tensor:
        """Return a copy of a vector, of which each rank makes its part; all ranks call it."""
        return self.made(vector, lambda place: vector[place])

    def made(self, like: Tensor, make: Callable[[slice], Tensor]) -> Tensor:
        """Return a vector of which each rank makes its part; all ranks call it."""
        vector = self.empty(like, len(like))
        for index in range(self._num_fragments):
            part = self._layout.fragment(index, self._num_fragments)
            for piece in self.pieces(part):
                place = slice(part.start + piece.start, part.start + piece.stop)
                vector[place] = make(place)
        self._ranks.meet()
        return vector

    # Whose work it is

    def pieces(self, part: slice, span: slice | None = None) -> Iterator[slice]:
        """Yield this rank's pieces."""
        return self._pieces_in(-1, self._ranges, part, span)

    def summed(self, part: slice, span: slice | None = None) -> Iterator[slice]:
        """Yield this machine's pieces: all slices, if it is the only one."""
        if not self._hosts.are_many:
            return super().summed(part, span)
        return self._pieces_of_host(self._hosts.index, part, span)

    def _pieces_of_host(self, host: int, part: slice, span: slice | None) -> Iterator[slice]:
        return self._pieces_in(host, self._machines.ranges[host], part, span)

    def _pieces_in(self, key: int, ranges: Sequence[Range], part: slice, span: slice | None) -> Iterator[slice]:
        place = key, part.start, part.stop
        if place not in self._pieces:
            self._pieces[place] = pieces_of(ranges, part)
        pieces = self._pieces[place]
        if span is not None:
            starts = [piece.start for piece in pieces]
            pieces = pieces[bisect.bisect_left(starts, span.start) : bisect.bisect_left(starts, span.stop)]
        return iter(pieces)

    def spans(self, parts: Sequence[slice]) -> Iterator[slice]:
        """Yield one span: each costs an order."""
        if parts:
            yield slice(parts[0].start, parts[-1].stop)

    # Parameters

    def after_read(self, flat: Tensor) -> None:
        """Complete blocks that straddle two machines, after all ranks have copied their parameters to ``flat``."""
        self._move_together(flat, self._machines.after_read)

    def before_write(self, flat: Tensor) -> None:
        """Fetch the elements of ``flat`` that this machine's parameters need and other machines have stepped."""
        self._move_together(flat, self._machines.before_write)

    def _move_together(self, flat: Tensor, transfers: Plan) -> None:
        self._move(flat, transfers)
        if self._hosts.are_many:
            self._ranks.meet()

    def _move(self, vector: Tensor, transfers: Plan, target: Tensor | None = None) -> None:
        if self._hosts.are_many and self._hosts.is_leader:
            self._hosts.move(vector, transfers, vector if target is None else target)

    # Encoding

    def have_encoded(self, fragment: int) -> None:
        """Have the other ranks freeze their contribution, and begin to encode it, as rank 0."""
        self._end_arrival()
        self._ranks.tell(Order.ENCODE, fragment)
        self.begin_encoding()
        if self._hosts.are_many:
            for vector in self._vectors:
                if len(vector) == self._layout.num_elements:
                    self.memory.forget(vector, self._machines.blocks[0])
            part = self._layout.fragment(fragment, self._num_fragments)
            self._arriving = self._aside.submit(self._receive_bytes, part)

    def begin_encoding(self) -> None:
        """Set this rank's progress back, and wait for the other ranks to do so."""
        self.publish(0)
        self._ranks.meet()

    def _end_arrival(self) -> None:
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            arriving.result()
        self._num_arrived = 0

    def assemble(self, part: slice, target: Tensor, progress: Progress) -> Assembly:
        """Assemble ``target`` in rank 0; the others encode their pieces, and have no target."""
        if self._ranks.is_leader:
            return _FinalAssembly(self, target, progress)
        return _PartAssembly(self, part, self.form.size(part.stop - part.start), progress)

    def publish(self, count: int) -> None:
        """Publish how many bytes this rank has encoded its pieces of; `_FAILED` if it cannot."""
        with _order:
            self.memory.counters[self._ranks.rank] = count

    def num_final(self) -> int:
        """Return how many leading bytes are final on all machines, as rank 0.

        Raises `CodecError` if a rank cannot encode its pieces, and `TrainingError` if one is lost.
        """
        count = min(self._counts())
        if self._arriving is not None:
            if self._arriving.done():
                self._arriving.result()  # raises what it has
            count = min(count, self._num_arrived)
        if count == _LOST:
            raise TrainingError("a rank on another machine is lost")
        if count == _FAILED:
            raise CodecError("a value to be sent is not finite, or too large")  # of another rank's pieces
        return count

    def _counts(self) -> list[int]:
        """Return what the ranks on this machine have published."""
        with _order:
            return list(map(int, self.memory.counters[list(self._hosts.own_ranks)]))

    def require_processes(self) -> None:
        """Raise `TrainingError` if a rank on this machine is gone."""
        for rank in self._hosts.own_ranks:
            if rank == self._ranks.rank:
                continue
            try:
                os.kill(int(self.memory.processes[rank]), 0)
            except ProcessLookupError:
                raise TrainingError(f"rank {rank} is lost") from None

    def _windows(self, part: slice) -> Iterator[slice]:
        bounds = list(slices(part.stop - part.start))
        for index in range(0, len(bounds), _WINDOW):
            yield slice(bounds[index].start, bounds[min(index + _WINDOW, len(bounds)) - 1].stop)

    def send_bytes(self, part: slice) -> None:
        """Send this machine's pieces of a contribution to rank 0 when all its ranks have encoded them.

        Each message ends with a byte: 0, or what is wrong, negated. Other machines' lowest ranks call it. Raises
        `TrainingError` if a rank is lost.
        """
        if not self._hosts.is_leader:
            return
        total, problem = self.form.size(part.stop - part.start), _LOST
        try:
            while not all(count in (total, _FAILED) for count in self._counts()):
                self.require_processes()
                time.sleep(_LOOK_SECONDS)
            problem = min(0, *self._counts())
        finally:  # rank 0 waits for as many messages
            outgoing, flag = torch.from_numpy(self.memory.outgoing), torch.tensor([-problem], dtype=torch.uint8)
            for window in self._windows(part):
                places = [slice(*place) for place in self._places_of_host(self._hosts.index, part, window)]
                self._hosts.send_aside(torch.cat([*(outgoing[place] for place in places), flag]))

    def _places_of_host(self, host: int, part: slice, span: slice) -> list[Range]:
        """Return where the bytes of a machine's pieces are in a contribution."""
        places = (bytes_of(self.form, piece) for piece in self._pieces_of_host(host, part, span))
        return [(place.start, place.stop) for place in places]

    def _receive_bytes(self, part: slice) -> None:
        """Receive the pieces of all other machines, as rank 0, and note how far all have come, or what is wrong."""
        outgoing, problem = torch.from_numpy(self.memory.outgoing), 0
        for window in self._windows(part):
            for host in range(1, len(self._hosts.members)):
                places = self._places_of_host(host, part, window)
                sizes = [stop - start for start, stop in places]
                *data, flag = self._hosts.receive_aside(host, sum(sizes) + 1).split([*sizes, 1])
                problem = min(problem, -int(flag))
                for (start, stop), received in zip(places, data, strict=True):
                    outgoing[start:stop] = received
            self._num_arrived = problem or bytes_of(self.form, window).stop

    # Decoding and the outer step

    def begin_decoding(self, part: slice, span: slice, encoded: Bytes, place: slice) -> Bytes:
        """Share the bytes that have arrived, as rank 0, and have all ranks decode their pieces."""
        if self._ranks.is_leader:
            self.memory.incoming[place] = encoded[place]
            self._ranks.tell(Order.DECODE, span.start, span.stop)
        others = range(1, len(self._hosts.members))
        self._move_together(
            torch.from_numpy(self.memory.incoming),
            [(0, host, self._places_of_host(host, part, span)) for host in others],
        )
        return self.memory.incoming

    def end_decoding(self, *, has_failed: bool) -> bool:
        """Meet the other ranks."""
        return self._ranks.meet(has_failed)

    def begin_step(self, order: int, weights: Sequence[float], rates: float, *, is_late: bool) -> None:
        """Have all ranks step their pieces."""
        if self._ranks.is_leader:
            self._ranks.tell(Order.OUTER, order, is_late, rates, *weights)
        if self._hosts.are_many:  # a machine's lowest rank may have clipped the momentum of all its ranks
            self._ranks.meet()

    def end_step(self) -> None:
        """Meet the other ranks."""
        self._ranks.meet()

    # Work of whole machines

    def tell_hosts(self, work: HostWork, *numbers: float) -> None:
        """Have the lowest rank of each other machine do the same work."""
        if self._hosts.are_many and self._ranks.is_leader:
            self._ranks.tell(Order.HOSTS, work, *numbers)

    @property
    def does_work_of_host(self) -> bool:
        """Return whether `Order.HOSTS` is for this rank."""
        return self._hosts.is_leader

    def add_up(self, *sums: float) -> Sequence[float]:
        """Return the sums over all machines."""
        return self._hosts.add_up(sums) if self._hosts.are_many else sums

    def keep(self, copier: Copier, vector: Tensor, copy: Tensor) -> Wait:
        """Copy this machine's part, as rank 0, and fetch the rest from the others."""
        if not self._hosts.are_many:
            return super().keep(copier, vector, copy)
        for start, stop in self._machines.blocks[0]:
            copy[start:stop] = vector[start:stop]
        self._gather(vector, copy)
        return lambda: None

    def gather(self, vector: Tensor) -> None:
        """Fetch what other machines have of a vector."""
        self._gather(vector, vector)

    def _gather(self, vector: Tensor, target: Tensor) -> None:
        self.tell_hosts(HostWork.GATHER, self._index_of(vector))
        self._move(vector, self._machines.to_gather, target)

    def spread(self, vectors: Mapping[str, Tensor]) -> None:
        """Send the other machines their parts of vectors that rank 0 has written."""
        for vector in vectors.values():
            self.tell_hosts(HostWork.SPREAD, self._index_of(vector))
            self._move(vector, self._machines.to_spread)

    def _index_of(self, vector: Tensor) -> int:
        places = [each.data_ptr() for each in self._vectors]
        return places.index(vector.data_ptr())

    def move_as_told(self, work: HostWork, index: float) -> None:
        """Do `HostWork.GATHER` or `HostWork.SPREAD` as another machine."""
        transfers = self._machines.to_gather if work is HostWork.GATHER else self._machines.to_spread
        self._move(self._vectors[int(index)], transfers)


# Held for a counter: ARM may reorder the bytes and their count.
_order = threading.Lock()


class _PartAssembly(Assembly):
    """The pieces of a rank other than rank 0, in shared memory."""

    def __init__(self, share: SharedVectors, part: slice, size: int, progress: Progress) -> None:
        super().__init__(torch.from_numpy(share.memory.outgoing[:size]), progress)
        self._share = share
        self._part = part

    def add(self, place: slice) -> None:
        """Publish this rank's progress."""
        self._share.publish(place.stop)

    def fail(self) -> None:
        """Notify rank 0, which waits for this rank's bytes."""
        self._share.publish(_FAILED)
        self._share.send_bytes(self._part)

    def seal(self) -> bytes:
        """Finish this rank's pieces."""
        self._share.publish(len(self.target))
        self._share.send_bytes(self._part)
        return b""


class _FinalAssembly(Assembly):
    """A contribution that all ranks encode in shared memory; rank 0 copies it to ``target``."""

    def __init__(self, share: SharedVectors, target: Tensor, progress: Progress) -> None:
        super().__init__(torch.from_numpy(share.memory.outgoing[: len(target)]), progress)
        self._share = share
        self._final = target
        self._num_final = 0

    def add(self, place: slice) -> None:
        """Publish this rank's progress, and collect what is final now."""
        self._share.publish(place.stop)
        self._collect()

    def seal(self) -> bytes:
        """Finish this rank's pieces; wait for the others and return the BLAKE3."""
        self._share.publish(len(self._final))
        while not self._collect():
            self._share.require_processes()
            time.sleep(_LOOK_SECONDS)
        return super().seal()

    def _collect(self) -> bool:
        """Copy the leading bytes that all ranks have finished; return whether that is all."""
        count = self._share.num_final()
        if count > self._num_final:
            place = slice(self._num_final, count)
            self._final[place] = self.target[place]
            self._num_final = count
            super().add(place)
        return count == len(self._final)


class _Told(msgspec.Struct, frozen=True):
    """What the other ranks need to take their share."""

    outer: OuterRules
    screening: ScreeningRules
    shapes: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class RankVectors:
    """One rank's view of the vectors that ranks share."""

    outer: OuterConfig
    screening: ScreeningConfig
    layout: Layout
    parameters: LocalParameters
    share: SharedVectors

    def read(self, flat: Tensor) -> None:
        """Copy the parameters to ``flat`` (n,), together with the other ranks."""
        self.parameters.read(flat)
        self.share.after_read(flat)

    def write(self, flat: Tensor) -> None:
        """Copy ``flat`` (n,) to the parameters, together with the other ranks."""
        self.share.before_write(flat)
        self.parameters.write(flat)


def share_vectors(
    ranks: Ranks,
    module: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    layout: Layout,
    outer: OuterConfig,
    screening: ScreeningConfig,
) -> RankVectors | None:
    """Share the vectors with the other ranks, as rank 0; None if there are none.

    ``parameters``: those of the layout, in its order; their names were sent by `Ranks.begin`. Raises `TrainingError`
    if there is no memory for it.
    """
    if not ranks.are_many:
        return None
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    told = _Told(cast("OuterRules", outer), cast("ScreeningRules", screening), shapes)
    ranks.tell_bytes(Order.SHARE, msgspec.msgpack.encode(told))
    return _shared(ranks, module, parameters, told)


def take_share(ranks: Ranks, module: nn.Module, parameters: Mapping[str, nn.Parameter], told: bytes) -> RankVectors:
    """Take a share, as another rank; ``told`` came with `Order.SHARE`. Raises as `share_vectors`."""
    return _shared(ranks, module, parameters, msgspec.msgpack.decode(told, type=_Told))


def _shared(ranks: Ranks, module: nn.Module, parameters: Mapping[str, nn.Parameter], told: _Told) -> RankVectors:
    outer = told.outer
    layout = Layout(tuple(told.shapes), tuple(told.shapes.values()), outer.codec)
    memory = _map_memory(ranks, lambda place: VectorMemory(outer, layout.num_elements, ranks.num_ranks, place))
    local = LocalParameters(module, parameters, layout, ranks)
    cut = Cut(layout, outer.fragments, ranks.gather(local.ranges), ranks.gather(local.needed))
    share = SharedVectors(memory, cut, form_of(outer.codec, outer.topk), ranks)
    return RankVectors(outer, told.screening, layout, local, share)


def _map_memory(ranks: Ranks, obtain: Callable[[str], VectorMemory]) -> VectorMemory:
    """Have the lowest rank of each machine create memory, and the others map it. Raises `TrainingError`."""
    memory: VectorMemory | None = None
    reason = ""
    try:
        memory = obtain("") if ranks.hosts.is_leader else None
    except (OSError, ValueError) as error:
        reason = str(error)
    places = ranks.gather("" if memory is None else memory.place)
    if not ranks.hosts.is_leader and (place := places[ranks.hosts.own_ranks[0]]):
        try:
            memory = obtain(place)
        except (OSError, ValueError) as error:
            reason = str(error)
    reasons = [each for each in ranks.gather(reason) if each]
    if memory is not None:
        memory.close()
    if memory is None or reasons:
        raise TrainingError(f"ranks cannot share memory for the vectors of an exchange: {'; '.join(reasons)}")
    return memory
