"""The faults that a scenario can have."""

from __future__ import annotations

from typing import Annotated, Final, Literal, get_args

import msgspec

# Each node is two Python processes of about 300 MB together; one machine holds no more.
MAX_NODES: Final = 128

FaultKind = Literal[
    "kill",
    "freeze",
    "restart",
    "flap",
    "slow",
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
# The fault ``slow`` may last until the end.
_LASTING: Final = {*get_args(FaultKind)} - {*_SUDDEN, "slow"}
NodeIndex = Annotated[int, msgspec.Meta(ge=0, lt=MAX_NODES)]
_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e6)]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault of one or several nodes."""

    kind: FaultKind
    """Faults of a node's processes: ``kill``: SIGKILL for good. ``restart``: SIGKILL, and a start in the same folder
    after ``duration``. ``flap``: repeated restarts for ``duration``, with ``interval`` between a kill and a start.
    ``freeze``: daemon and trainer are stopped (SIGSTOP) for ``duration``. ``starve``: the two get together one part in
    ``factor`` of a processor, for ``duration``. ``slow``: the trainer gets only one part in ``factor`` of the time, for
    ``duration``, or until the end. ``join``: the node starts at this moment. ``leave``: the node is asked to leave.

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
    at_seconds: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Seconds after the launch of the first node."""
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
        if [self.at_round, self.at_seconds, self.after_start].count(None) != 2:
            raise ValueError(f"fault {self.kind!r}: say one of at_round, at_seconds and after_start")
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
