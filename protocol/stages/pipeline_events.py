"""Events and outputs of `farandole.protocol.stages.pipeline`.

Links carry the messages of `farandole.protocol.stages.activations`. The trainer's jobs and reports are the messages of
`farandole.protocol.trainer.trainer_messages`. Both are used here as they are on the wire.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..trainer.trainer_messages import InnerStepTaken, Settle, TakeInnerStep, Work, Worked
from ..wire.timers import SetTimer, TimerFired
from . import activations as wire

# Events


@dataclass(frozen=True, slots=True)
class NodesChanged:
    """The live nodes of the next stage, and how many our own stage (with us), the one before and stage 0 have."""

    next_hops: frozenset[bytes]
    num_own: int
    num_previous: int
    num_origins: int


@dataclass(frozen=True, slots=True)
class LinkOpened:
    """A link has exchanged greetings. ``peer`` is downstream of us, or upstream (``is_upstream`` False)."""

    link: int
    peer: bytes
    is_upstream: bool
    """Whether we are the upstream node."""
    is_return: bool = False
    """Whether microbatches return to their origin over it."""


@dataclass(frozen=True, slots=True)
class LinkFailed:
    """A link that `OpenLink` asked for could not be opened."""

    peer: bytes
    is_return: bool


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """An open link was closed."""

    link: int


@dataclass(frozen=True, slots=True)
class Received:
    """A message from a link's peer. `ReceiveInto` answers a `DataReceived` whose data are wanted."""

    link: int
    message: wire.Event


@dataclass(frozen=True, slots=True)
class Tell:
    """The question to an origin how a microbatch ended, or its answer: to a peer, or from it where it is an event."""

    peer: bytes
    message: wire.Question | wire.Answer


@dataclass(frozen=True, slots=True)
class RoundBegan:
    """Microbatches may be begun."""

    round: int
    max_steps: int = 0
    """Inner steps of the round; 0: until `RoundEnds`."""
    is_followed: bool = False
    """Whether the next round begins as soon as this one's contribution is made."""


@dataclass(frozen=True, slots=True)
class Measure:
    """Measure the loss of N microbatches of held-out text, before others are drawn; `Measured` follows. At stage 0."""

    num_microbatches: int


@dataclass(frozen=True, slots=True)
class RoundEnds:
    """Let the round's microbatches under way end; `RoundDrained` follows."""


Event = (
    NodesChanged
    | LinkOpened
    | LinkFailed
    | LinkClosed
    | Received
    | Tell
    | Worked
    | InnerStepTaken
    | RoundBegan
    | Measure
    | RoundEnds
    | TimerFired
)


# Outputs


@dataclass(frozen=True, slots=True)
class OpenLink:
    """Open a link to a node of the next stage, or to the origin of a microbatch (``is_return``)."""

    peer: bytes
    is_return: bool


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Close a link: its peer is gone from the run, or does not answer."""

    link: int


@dataclass(frozen=True, slots=True)
class ReceiveInto:
    """Copy the data that a link has just received into this slot."""

    link: int
    slot: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message over a link. A `Dropped` is not sent once the gradient has been, to the last byte."""

    link: int
    message: wire.Credits | wire.Forward | wire.Gradient | wire.Dropped | wire.Settled
    slot: int | None = None
    """The slot whose outgoing data follow a `Forward` or a `Gradient`."""


@dataclass(frozen=True, slots=True)
class RoundDrained:
    """The round has nothing under way: the contribution can be made. No jobs come until the next round begins."""

    round: int


@dataclass(frozen=True, slots=True)
class Measured:
    """The trainer has the losses of the held-out text; some are missing if their microbatches were lost repeatedly."""


@dataclass(frozen=True, slots=True)
class Avoided:
    """A peer is avoided for ``seconds``: nothing is sent to it, and nothing accepted from it."""

    peer: bytes
    reason: str
    seconds: float


Output = (
    OpenLink
    | CloseLink
    | ReceiveInto
    | Send
    | Tell
    | Work
    | Settle
    | TakeInnerStep
    | RoundDrained
    | Measured
    | Avoided
    | SetTimer
)
