"""Events and outputs of `farandole.protocol.epochs.leases`.

The trainer's reports and the instructions what to draw are the messages of
`farandole.protocol.trainer.trainer_messages`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..state.entries import Kind, Lease
from ..state.state import RunState
from ..trainer.trainer_messages import DrawSlices, SlicesTrained

# Events


@dataclass(frozen=True, slots=True)
class Heard:
    """A new entry of the run state, by any author, including this node in an earlier life."""

    author: bytes
    index: int
    lease: Lease


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The run state has no lease entries of this author any more: it has been away for a long time."""

    author: bytes


@dataclass(frozen=True, slots=True)
class Ticked:
    """About a second has passed."""

    live: frozenset[bytes]
    """The live members that draw data, this node excluded."""
    period: float
    """Seconds between heartbeats."""
    proven: frozenset[bytes] = frozenset()
    """Authors whose claims count (`farandole.protocol.state.believing`), live or not."""
    signed_speeds: Mapping[bytes, float] = field(default_factory=dict)
    """Speeds of live members in slices per second, as each signs its own."""


@dataclass(frozen=True, slots=True)
class Left:
    """Event: this node stops training."""


Event = Heard | Forgotten | SlicesTrained | Ticked | Left


# Outputs


@dataclass(frozen=True, slots=True)
class Announce:
    """Output: write this entry to the run state."""

    index: int
    lease: Lease


@dataclass(frozen=True, slots=True)
class EpochBegan:
    """Output: an epoch began. If ``epoch`` is the run's number of epochs, the last one is over instead."""

    epoch: int


Output = Announce | DrawSlices | EpochBegan


def news(state: RunState, seen: dict[tuple[bytes, int], int]) -> Iterator[Heard | Forgotten]:
    """Yield the lease entries that ``seen`` (author and slot -> tick) lacks, and the authors without entries now."""
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
