"""Events and outputs of `farandole.protocol.stages.pipeline`.

Links carry the messages of `farandole.protocol.stages.activations`. The trainer's commands and reports are the messages
of `farandole.protocol.trainer.trainer_messages`. Both are used here as they are on the wire.

`Train`, `FinishRound` and `Validate` are events and outputs: the trainer gets each when its turn has come. `Train` is
passed on at once; `FinishRound` when the round has nothing under way, so that no jobs come before the next round; and
`Validate` when the trainer has the losses of the held-out text, except of microbatches that were lost repeatedly.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..trainer.trainer_messages import (
    FinishRound,
    InnerStepTaken,
    Settle,
    TakeInnerStep,
    Train,
    Validate,
    Work,
    Worked,
)
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
    """An open link was closed; as an output: close it, as its peer is gone from the run, or does not answer."""

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


Event = (
    NodesChanged
    | LinkOpened
    | LinkFailed
    | LinkClosed
    | Received
    | Tell
    | Worked
    | InnerStepTaken
    | Train
    | FinishRound
    | Validate
    | TimerFired
)


# Outputs


@dataclass(frozen=True, slots=True)
class OpenLink:
    """Open a link to a node of the next stage, or to the origin of a microbatch (``is_return``)."""

    peer: bytes
    is_return: bool


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
class Avoided:
    """A peer is avoided for ``seconds``: nothing is sent to it, and nothing accepted from it."""

    peer: bytes
    reason: str
    seconds: float


Output = (
    OpenLink
    | LinkClosed
    | ReceiveInto
    | Send
    | Tell
    | Work
    | Settle
    | TakeInnerStep
    | Train
    | FinishRound
    | Validate
    | Avoided
    | SetTimer
)
