"""The machines on which the ranks of a cluster run: who shares memory with whom, and transfers between machines.

The lowest rank of a machine speaks for it. Sums, and the elements of flat vectors, travel over one gloo group of these
ranks, between two steps of the loop. The bytes of a contribution travel over another one, while the loop goes on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor, distributed

from .ranges import Range, common

# Elements of a vector that travel at once: what has to be copied together for it stays small.
_PACK: Final = 1 << 22

Plan = Sequence[tuple[int, int, Sequence[Range]]]
"""Transfers of a vector's elements: from machine, to machine, ranges; in the order in which all machines make them."""


def plan(have: Sequence[Sequence[Range]], want: Sequence[Sequence[Range]]) -> Plan:
    """Plan the transfers after which each machine has what it wants; ``have`` and ``want`` are by machine, ascending.

    What two machines have, both send to a third: let each element be had by one.
    """
    pairs = itertools.permutations(range(len(have)), 2)
    transfers = ((giver, taker, list(common(have[giver], want[taker]))) for giver, taker in pairs)
    return [transfer for transfer in transfers if transfer[2]]


class Hosts:
    """The machines, as one rank sees them; ``members`` are the ranks of each, ascending. All ranks create it."""

    def __init__(self, members: Sequence[Sequence[int]], rank: int, patience: timedelta) -> None:
        self.members = members
        self.index = next(index for index, ranks in enumerate(members) if rank in ranks)
        """Which machine this is: 0 has rank 0."""
        self._leaders = [ranks[0] for ranks in members]
        self.is_leader = rank == self._leaders[self.index]
        """Whether this rank speaks for its machine."""
        self._between_steps: Any = None  # not every torch build has a type for groups
        self._aside: Any = None
        if self.are_many:
            self._between_steps = distributed.new_group(self._leaders, backend="gloo", timeout=patience)
            self._aside = distributed.new_group(self._leaders, backend="gloo", timeout=patience)

    @property
    def are_many(self) -> bool:
        """Return whether there are other machines."""
        return len(self.members) > 1

    @property
    def own_ranks(self) -> Sequence[int]:
        """Return the ranks on this machine."""
        return self.members[self.index]

    # Between two steps

    def add_up(self, values: Sequence[float]) -> list[float]:
        """Return the sums of what the machines give, one after another."""
        sums = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(sums, group=self._between_steps)
        return sums.tolist()

    def move(self, vector: Tensor, transfers: Plan, target: Tensor) -> None:
        """Make the planned transfers of a vector (n,), of any type; ``target`` (n,) receives this machine's."""
        for giver, taker, ranges in transfers:
            for pack in _packs(ranges):
                if self.index == giver:
                    packed = torch.cat([vector[start:stop] for start, stop in pack])
                    distributed.send(packed, self._leaders[taker], group=self._between_steps)
                elif self.index == taker:
                    sizes = [stop - start for start, stop in pack]
                    packed = vector.new_empty(sum(sizes))
                    distributed.recv(packed, self._leaders[giver], group=self._between_steps)
                    for (start, stop), values in zip(pack, packed.split(sizes), strict=True):
                        target[start:stop] = values

    # While the loop goes on

    def send_aside(self, data: Tensor) -> None:
        """Send ``data`` (bytes,) uint8 to rank 0."""
        distributed.send(data, 0, group=self._aside)

    def receive_aside(self, host: int, size: int) -> Tensor:
        """Receive what a machine sends with `send_aside`, as rank 0."""
        data = torch.empty(size, dtype=torch.uint8)
        distributed.recv(data, self._leaders[host], group=self._aside)
        return data


def _packs(ranges: Sequence[Range]) -> Iterator[list[Range]]:
    """Cut the ranges into lists of at most `_PACK` elements."""
    pack, room = list[Range](), _PACK
    for start, stop in ranges:
        while start < stop:
            cut = min(stop, start + room)
            pack.append((start, cut))
            start, room = cut, room - (cut - start)
            if not room:
                yield pack
                pack, room = [], _PACK
    if pack:
        yield pack


def find_hosts(
    rank: int, gather: Callable[[Any], list[Any]], show: Callable[[], str], sees: Callable[[str], bool]
) -> list[list[int]]:
    """Group the ranks by the machine that they share memory on.

    ``gather`` returns what each rank gives; ``show`` puts something where others on this machine see it, and returns
    the place; ``sees`` looks for it there. Every rank calls it.
    """
    members, rest = list[list[int]](), gather(rank)
    while rest:
        leader = rest[0]
        place = gather(show() if rank == leader else "")[leader]
        seen = gather(rank == leader or sees(place))
        members.append([each for each in rest if seen[each]])
        rest = [each for each in rest if not seen[each]]
    return members
