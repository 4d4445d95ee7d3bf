"""Random faults: a schedule that is a pure function of the seed, the nodes and the time.

Every schedule can be judged: a node has one fault at a time, and then time to recover; at most half of the nodes have
one; the network is in two parts at most; all faults end some time before the end, when all nodes must have recovered.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from farandole.protocol.wire.errors import FarandoleError

from .fault import MAX_NODES, Fault, FaultKind, NodeIndex

# Seconds without faults: after all nodes have begun to train, and at the end; in short plays these shares.
WARM_UP, CALM = 10.0, 60.0
WARM_UP_SHARE, CALM_SHARE = 0.05, 0.35
# Seconds until a node may have another fault, and counts as recovered.
RECOVERY: Final = 15.0
# Range of a fault's seconds; in plays shorter than this it is shorter in proportion, but at least the minimum.
FULL_LENGTH: Final = 600.0
LEAST_DURATION: Final = 2.0
DURATIONS: Final[dict[FaultKind, tuple[float, float]]] = {
    "restart": (1.0, 20.0),
    "freeze": (1.0, 30.0),
    "starve": (15.0, 40.0),
    "partition": (10.0, 40.0),
    "fill_disk": (15.0, 45.0),
    "set_clock": (20.0, 60.0),
}
# Causes: an hour (summer time), a month (an empty battery), a user's change; and a drift of 1 %.
OFFSETS: Final = (3_600.0, -3_600.0, -30 * 86_400.0, 90.0, -90.0)
DRIFTS: Final = (0.0, 0.01, -0.01)
# Divisors of the node's processor time; 20 leaves 5 %, as on a machine on which a game runs.
FACTORS: Final = (2.0, 5.0, 20.0)
MAX_DRAWN: Final = 500
_ATTEMPTS: Final = 200

_Kinds = Annotated[tuple[FaultKind, ...], msgspec.Meta(min_length=1)]


class ChaosError(FarandoleError):
    """There is no such schedule; the message says why."""


class Chaos(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A scenario's settings of its random faults."""

    seconds: Annotated[float, msgspec.Meta(gt=0, le=1e6)]
    """Approximate seconds of the training: there is no fault near their end."""
    faults: Annotated[int, msgspec.Meta(ge=1, le=MAX_DRAWN)]
    kinds: _Kinds = tuple(DURATIONS)
    """Used in turn, so that each has its share."""
    nodes: Annotated[tuple[NodeIndex, ...], msgspec.Meta(max_length=MAX_NODES)] = ()
    """Nodes that may have faults; none: all nodes. At most half of these have one at a time."""

    def __post_init__(self) -> None:
        if unknown := set(self.kinds) - set(DURATIONS):
            raise ValueError(f"chaos has no {', '.join(sorted(unknown))}; it has {', '.join(DURATIONS)}")


@dataclass(frozen=True, slots=True)
class _Busy:
    """The time in which nodes have a fault, or recover from it."""

    nodes: frozenset[int]
    begins_at: float
    ends_at: float
    is_partition: bool

    def meets(self, begins_at: float, ends_at: float) -> bool:
        return self.begins_at < ends_at and begins_at < self.ends_at


def draw_faults(chaos: Chaos, num_nodes: int, seed: int) -> tuple[Fault, ...]:
    """Draw the schedule's faults, in the order in which they begin; `ChaosError` if there is no room for them."""
    rng = random.Random(f"chaos {seed}")
    nodes = chaos.nodes or tuple(range(num_nodes))
    begins_at = min(WARM_UP, WARM_UP_SHARE * chaos.seconds)
    ends_at = chaos.seconds - min(CALM, CALM_SHARE * chaos.seconds)
    kinds = [chaos.kinds[index % len(chaos.kinds)] for index in range(chaos.faults)]
    rng.shuffle(kinds)
    faults: list[Fault] = []
    busy: list[_Busy] = []
    for index, kind in enumerate(kinds):
        # Evenly spaced first; where that has no room, at random.
        even = begins_at + (ends_at - begins_at) * index / len(kinds)
        for attempt in range(_ATTEMPTS):
            at = even if attempt < _ATTEMPTS // 2 else rng.uniform(begins_at, ends_at)
            fault = _draw(kind, at, chaos.seconds, nodes, rng)
            recovery = min(RECOVERY, RECOVERY * chaos.seconds / FULL_LENGTH)
            taken = _busy(fault, recovery)
            if taken.ends_at - recovery <= ends_at and _has_room(taken, busy, len(nodes)):
                faults.append(fault)
                busy.append(taken)
                break
        else:
            raise ChaosError(f"no room for {chaos.faults} faults among {len(nodes)} nodes in {chaos.seconds:g} s")
    return tuple(sorted(faults, key=lambda fault: fault.after_start or 0.0))


def _draw(kind: FaultKind, at: float, seconds: float, nodes: Sequence[int], rng: random.Random) -> Fault:
    shortened = min(1.0, seconds / FULL_LENGTH)
    least, most = (max(LEAST_DURATION, bound * shortened) for bound in DURATIONS[kind])
    count = rng.choice((1, len(nodes) // 2)) if kind == "partition" else 1
    return Fault(
        kind=kind,
        nodes=tuple(sorted(rng.sample(nodes, max(1, count)))),
        after_start=round(at, 1),
        duration=round(rng.uniform(least, most), 1),
        factor=rng.choice(FACTORS) if kind == "starve" else 4.0,
        offset=rng.choice(OFFSETS) if kind == "set_clock" else 0.0,
        drift=rng.choice(DRIFTS) if kind == "set_clock" else 0.0,
    )


def _busy(fault: Fault, recovery: float) -> _Busy:
    assert fault.after_start is not None
    assert fault.duration is not None
    ends_at = fault.after_start + fault.duration + recovery
    return _Busy(frozenset(fault.nodes), fault.after_start, ends_at, fault.kind == "partition")


def _has_room(taken: _Busy, busy: Sequence[_Busy], num_nodes: int) -> bool:
    """Return whether a fault fits: no node twice, no second partition, and half of the nodes without a fault.

    All faults that overlap it are counted together, though they may not all overlap each other.
    """
    met = [other for other in busy if other.meets(taken.begins_at, taken.ends_at)]
    if any(other.nodes & taken.nodes or (other.is_partition and taken.is_partition) for other in met):
        return False
    return len(taken.nodes.union(*(other.nodes for other in met))) <= num_nodes // 2
