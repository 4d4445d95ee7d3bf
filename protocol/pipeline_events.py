"""What happens to a node's part in the pipeline, and what it asks for: what `protocol.pipeline` takes and gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Work = Literal["draw", "forward", "tail", "backward", "keep", "drop"]


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
    """A link is greeted. ``peer`` is downstream of us, or upstream (``is_upstream`` False)."""

    link: int
    peer: bytes
    is_upstream: bool
    """Whether we are the upstream node."""
    is_return: bool = False
    """Whether microbatches return to their origin over it."""
    credits: int = 0


@dataclass(frozen=True, slots=True)
class LinkFailed:
    """No link could be opened to this peer, which was asked for."""

    peer: bytes
    is_return: bool


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """A link that was open is no more."""

    link: int


@dataclass(frozen=True, slots=True)
class CreditsGiven:
    """By the downstream node of a link."""

    link: int
    total: int


@dataclass(frozen=True, slots=True)
class Arriving:
    """A `Forward`: a microbatch begins to come. Answered at once by `ReceiveInto` or `SendDropped`."""

    link: int
    index: int
    ticket: bytes
    origin: bytes
    round: int
    seconds_left: float
    is_held_out: bool = False


@dataclass(frozen=True, slots=True)
class GradientArriving:
    """A `Gradient` begins to come. Answered at once by `ReceiveInto`."""

    link: int
    index: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """All data of one of the two have come."""

    link: int
    index: int


@dataclass(frozen=True, slots=True)
class HopDropped:
    """The downstream node has dropped a microbatch."""

    link: int
    index: int
    reason: str
    is_untouched: bool


@dataclass(frozen=True, slots=True)
class HopSettled:
    """The upstream node says how a microbatch ended."""

    link: int
    index: int
    is_kept: bool


@dataclass(frozen=True, slots=True)
class Asked:
    """A node on its route asks how a microbatch of ours ended."""

    peer: bytes
    ticket: bytes


@dataclass(frozen=True, slots=True)
class OriginAnswered:
    """An origin's answer; ``is_kept`` None: not decided yet."""

    peer: bytes
    ticket: bytes
    is_kept: bool | None


@dataclass(frozen=True, slots=True)
class WorkDone:
    """The trainer has done its oldest job."""

    problem: str = ""


@dataclass(frozen=True, slots=True)
class Stepped:
    """The trainer has taken the inner step."""


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
    """The loss of so many microbatches of held-out text, before others are drawn; `Measured` follows. At stage 0."""

    num_microbatches: int


@dataclass(frozen=True, slots=True)
class RoundEnds:
    """What is under way for the round comes to its end, then `RoundDrained`."""


@dataclass(frozen=True, slots=True)
class PipelineTimerFired:
    """The time of the last `SetPipelineTimer` has come."""


Event = (
    NodesChanged
    | LinkOpened
    | LinkFailed
    | LinkClosed
    | CreditsGiven
    | Arriving
    | GradientArriving
    | Arrived
    | HopDropped
    | HopSettled
    | Asked
    | OriginAnswered
    | WorkDone
    | Stepped
    | RoundBegan
    | Measure
    | RoundEnds
    | PipelineTimerFired
)


# Outputs


@dataclass(frozen=True, slots=True)
class OpenLink:
    """To a node of the next stage, or to the origin of a microbatch (``is_return``)."""

    peer: bytes
    is_return: bool


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Its peer is gone from the run, or does not answer."""

    link: int


@dataclass(frozen=True, slots=True)
class ReceiveInto:
    """The data that begin to come go into this slot."""

    link: int
    index: int
    slot: int


@dataclass(frozen=True, slots=True)
class SendForward:
    """The slot's outgoing data go over the link, as its next microbatch."""

    link: int
    slot: int
    ticket: bytes
    origin: bytes
    round: int
    seconds_left: float
    is_held_out: bool = False


@dataclass(frozen=True, slots=True)
class SendGradient:
    """The slot's outgoing data go back."""

    link: int
    index: int
    slot: int


@dataclass(frozen=True, slots=True)
class SendDropped:
    """To the upstream node, unless its gradient has been sent to the last byte."""

    link: int
    index: int
    reason: str
    is_untouched: bool


@dataclass(frozen=True, slots=True)
class SendSettled:
    """To the downstream node."""

    link: int
    index: int
    is_kept: bool


@dataclass(frozen=True, slots=True)
class SendCredits:
    """To the upstream node."""

    link: int
    total: int


@dataclass(frozen=True, slots=True)
class AskOrigin:
    """The origin, how a microbatch ended."""

    origin: bytes
    ticket: bytes


@dataclass(frozen=True, slots=True)
class Tell:
    """Who asked."""

    peer: bytes
    ticket: bytes
    is_kept: bool | None


@dataclass(frozen=True, slots=True)
class Compute:
    """A job for the trainer, which does them in order."""

    work: Work
    slot: int
    is_following: bool = False
    """Whether what is begun is for the inner step after the next one that is taken."""
    is_held_out: bool = False
    """Whether what is begun is for its loss alone."""
    number: int = 0
    """Which microbatch of the held-out text is drawn, if one is."""


@dataclass(frozen=True, slots=True)
class TakeStep:
    """The inner step, with what the trainer has summed for it."""


@dataclass(frozen=True, slots=True)
class RoundDrained:
    """Nothing is under way for the round: the contribution can be made. No jobs come until the next one begins."""

    round: int


@dataclass(frozen=True, slots=True)
class Measured:
    """The trainer has the losses of what was to be measured; not all, if some were lost again and again."""


@dataclass(frozen=True, slots=True)
class SetPipelineTimer:
    """Replaces the one before."""

    at: float


Output = (
    OpenLink
    | CloseLink
    | ReceiveInto
    | SendForward
    | SendGradient
    | SendDropped
    | SendSettled
    | SendCredits
    | AskOrigin
    | Tell
    | Compute
    | TakeStep
    | RoundDrained
    | Measured
    | SetPipelineTimer
)
