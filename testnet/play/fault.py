"""The faults that a scenario can have."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Annotated, Final, Literal, get_args

import msgspec

# Each node is two Python processes of about 300 MB together; one machine holds no more.
MAX_NODES: Final = 128

FaultKind = Literal[
    "kill",
    "freeze",
    "restart",
    "flap",
    "starve",
    "join",
    "leave",
    "fill_disk",
    "set_clock",
    "cut",
    "unplug",
    "reboot_router",
    "change_address",
    "partition",
]
HOME_FAULTS: Final = ("cut", "unplug", "reboot_router", "change_address", "partition")
_SUDDEN: Final = ("kill", "join", "leave", "change_address")
_LASTING: Final = {*get_args(FaultKind)} - {*_SUDDEN}
NodeIndex = Annotated[int, msgspec.Meta(ge=0, lt=MAX_NODES)]
_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e6)]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault of one or several nodes."""

    kind: FaultKind
    """Faults of a node's processes: ``kill``: SIGKILL for good. ``restart``: SIGKILL, and a start in the same folder
    after ``duration``. ``flap``: repeated restarts for ``duration``, with ``interval`` between a kill and a start.
    ``freeze``: daemon and trainer are stopped (SIGSTOP) for ``duration``. ``starve``: the two get together one part in
    ``factor`` of a processor, for ``duration``. ``join``: the node starts at this moment. ``leave``: the node is asked
    to leave.

    Faults of its machine, for ``duration``: ``fill_disk``: its files cannot grow. ``set_clock``: its clock jumps by
    ``offset`` and continues with ``drift``.

    Faults of its home, for ``duration``: ``cut``: nothing goes through its line; ``unplug``: its cable is pulled;
    ``reboot_router``: its router is off, and forgets everything; ``partition``: nothing goes between these nodes and
    the others. And ``change_address``: it gets another public address."""
    nodes: tuple[NodeIndex, ...] = ()
    of_stage: Annotated[int, msgspec.Meta(ge=0, le=511)] | None = None
    """Instead of ``nodes``: ``count`` of the nodes that hold this stage then, the last ones first."""
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_NODES)] = 1
    at_round: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """The round of the most advanced live node at which the fault begins."""
    after_start: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Seconds after all nodes but the late joiners have begun to train."""
    duration: _Positive | None = None
    factor: Annotated[float, msgspec.Meta(gt=1, le=1_000)] = 4.0
    interval: _Positive = 2.0
    """For ``flap``, in seconds."""
    offset: Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)] = 0.0
    """For ``set_clock``, in seconds."""
    drift: Annotated[float, msgspec.Meta(gt=-1, le=1)] = 0.0
    """For ``set_clock``: 0.01 is 1 % fast."""

    def __post_init__(self) -> None:
        if bool(self.nodes) == (self.of_stage is not None):
            raise ValueError(f"fault {self.kind!r}: say its nodes, or of_stage")
        if self.kind == "join" and self.of_stage is not None:
            raise ValueError("fault 'join': who has not joined holds no stage")
        if (self.at_round is None) == (self.after_start is None):
            raise ValueError(f"fault {self.kind!r}: say at_round, or after_start")
        if self.kind in _LASTING and self.duration is None:
            raise ValueError(f"fault {self.kind!r}: say its duration in seconds")
        if self.kind in _SUDDEN and self.duration is not None:
            raise ValueError(f"fault {self.kind!r} has no duration")

    @property
    def seconds(self) -> float:
        """Return the duration of a fault that lasts."""
        assert self.duration is not None, "checked when it was made"
        return self.duration


class FaultReport(msgspec.Struct, frozen=True):
    """A fault that occurred."""

    kind: str
    nodes: list[int]
    at: float
    """Seconds after the launch of the first node."""
    duration: float | None
    standstill: dict[int, float | None]
    """Node -> the longest time without an inner step, from the fault's beginning until the first step after its end;
    None: it took no step after it. Sampled once a second."""
    healed_in: float | None = None
    """Seconds from the end of a partition until all nodes had one run state; None: not within
    `farandole.testnet.play.faults.HEAL_TIMEOUT`."""


# Random faults: a schedule that is a pure function of the seed, the nodes and the time.
#
# Every schedule can be judged: a node has one fault at a time, and then time to recover; at most half of the nodes have
# one; the network is in two parts at most; all faults end some time before the end, when all nodes must have recovered.

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


class Chaos(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A scenario's settings of its random faults."""

    seconds: Annotated[float, msgspec.Meta(gt=0, le=1e6)]
    """Approximate seconds of the training: there is no fault near their end."""
    faults: Annotated[int, msgspec.Meta(ge=1, le=MAX_DRAWN)]
    kinds: Annotated[tuple[FaultKind, ...], msgspec.Meta(min_length=1)] = tuple(DURATIONS)
    """Used in turn, so that each has its share."""
    nodes: Annotated[tuple[NodeIndex, ...], msgspec.Meta(max_length=MAX_NODES)] = ()
    """Nodes that may have faults; none: all nodes. At most half of these have one at a time."""

    def __post_init__(self) -> None:
        if unknown := set(self.kinds) - set(DURATIONS):
            raise ValueError(f"chaos has no {', '.join(sorted(unknown))}; it has {', '.join(DURATIONS)}")


def draw_faults(chaos: Chaos, num_nodes: int, seed: int) -> tuple[Fault, ...]:
    """Draw the schedule's faults, in the order in which they begin; `ValueError` if there is no room for them."""
    rng = random.Random(f"chaos {seed}")
    nodes = chaos.nodes or tuple(range(num_nodes))
    begins_at = min(WARM_UP, WARM_UP_SHARE * chaos.seconds)
    ends_at = chaos.seconds - min(CALM, CALM_SHARE * chaos.seconds)
    kinds = [chaos.kinds[index % len(chaos.kinds)] for index in range(chaos.faults)]
    rng.shuffle(kinds)
    faults: list[Fault] = []
    shortened = min(1.0, chaos.seconds / FULL_LENGTH)
    recovery = min(RECOVERY, RECOVERY * chaos.seconds / FULL_LENGTH)
    for index, kind in enumerate(kinds):
        # Evenly spaced first; where that has no room, at random.
        even = begins_at + (ends_at - begins_at) * index / len(kinds)
        least, most = (max(LEAST_DURATION, bound * shortened) for bound in DURATIONS[kind])
        for attempt in range(_ATTEMPTS):
            at = even if attempt < _ATTEMPTS // 2 else rng.uniform(begins_at, ends_at)
            count = rng.choice((1, len(nodes) // 2)) if kind == "partition" else 1
            fault = Fault(
                kind=kind,
                nodes=tuple(sorted(rng.sample(nodes, max(1, count)))),
                after_start=round(at, 1),
                duration=round(rng.uniform(least, most), 1),
                factor=rng.choice(FACTORS) if kind == "starve" else 4.0,
                offset=rng.choice(OFFSETS) if kind == "set_clock" else 0.0,
                drift=rng.choice(DRIFTS) if kind == "set_clock" else 0.0,
            )
            if (fault.after_start or 0.0) + fault.seconds <= ends_at and _has_room(fault, faults, recovery, len(nodes)):
                faults.append(fault)
                break
        else:
            raise ValueError(f"no room for {chaos.faults} faults among {len(nodes)} nodes in {chaos.seconds:g} s")
    return tuple(sorted(faults, key=lambda fault: fault.after_start or 0.0))


def _has_room(fault: Fault, others: Sequence[Fault], recovery: float, num_nodes: int) -> bool:
    """Return whether a fault fits: no node twice, no second partition, and half of the nodes without a fault.

    Until its recovery a node counts as one with a fault. All faults that overlap are counted together, though they may
    not all overlap each other.
    """

    def meets(other: Fault) -> bool:
        early, late = sorted((each.after_start or 0.0, each.seconds) for each in (fault, other))
        return late[0] < early[0] + early[1] + recovery

    met = list(filter(meets, others))
    nodes = set(fault.nodes)
    if any(nodes & set(other.nodes) or other.kind == fault.kind == "partition" for other in met):
        return False
    return len(nodes.union(*(other.nodes for other in met))) <= num_nodes // 2
