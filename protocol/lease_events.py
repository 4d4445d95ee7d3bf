"""Events and outputs of the leases: what `farandole.protocol.leases` takes and gives.

What the trainer reports, and what it is told to draw, are the messages of `farandole.protocol.trainer_messages`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from .entries import Kind, Lease
from .state import RunState
from .trainer_messages import DrawSlices, SlicesTrained

# Events


@dataclass(frozen=True, slots=True)
class Heard:
    """A new entry of the run state, of anybody; this node's own ones of earlier lives as well."""

    author: bytes
    index: int
    lease: Lease


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The run state has nothing of this author any more, who has been away for long."""

    author: bytes


@dataclass(frozen=True, slots=True)
class Ticked:
    """A second or so has passed."""

    live: frozenset[bytes]
    """The live members that draw data, this node excluded."""
    period: float
    """Seconds between heartbeats."""
    proven: frozenset[bytes] = frozenset()
    """Authors whose word counts (`farandole.protocol.acquaintance`), live or not."""
    signed_speeds: Mapping[bytes, float] = field(default_factory=dict)
    """Slices a second of live members, as each says of itself."""


@dataclass(frozen=True, slots=True)
class Left:
    """This node trains no more."""


Event = Heard | Forgotten | SlicesTrained | Ticked | Left


# Outputs


@dataclass(frozen=True, slots=True)
class Announce:
    """Write this entry."""

    index: int
    lease: Lease


@dataclass(frozen=True, slots=True)
class EpochBegan:
    """Of the next epoch; or the last one is over, if it is the run's number of epochs."""

    epoch: int


Output = Announce | DrawSlices | EpochBegan


def news(state: RunState, seen: dict[tuple[bytes, int], int]) -> Iterator[Heard | Forgotten]:
    """What the run state has of leases that ``seen`` (author and slot -> tick) has not; and of whom it has none now."""
    there: set[tuple[bytes, int]] = set()
    for entry in state.entries(Kind.LEASE):
        slot = entry.author, entry.index
        there.add(slot)
        if seen.get(slot) != entry.tick:
            seen[slot] = entry.tick
            yield Heard(entry.author, entry.index, entry.payload)
    if len(there) == len(seen):
        return
    gone = seen.keys() - there
    for slot in gone:
        del seen[slot]
    for author in {author for author, _ in gone} - {author for author, _ in there}:
        yield Forgotten(author)
