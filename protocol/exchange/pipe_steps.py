"""The steps of a pipe's route, and everything that either end may send in each of them: a table and its conditions.

`farandole.protocol.exchange.pipe` applies both to what is sent (`LocalProtocolError`) and to what is received
(`RemoteProtocolError`). Each end keeps one step, which the messages of both ends move. The two may differ only while
messages cross: the answerer's `Reroute` and `Received` may cross the opener's `Route`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple, Protocol

# Routes of one pipe: three channels, each of which may break, and the stream.
MAX_ROUTES = 4


class RouteStep(enum.Enum):
    """The route that two ends have agreed on, or are about to agree on."""

    IDLE = "idle"  # nothing may move yet
    UNROUTED = "without a route"
    PROPOSED = "proposing the first route"
    CHANNEL = "on a channel"
    LOST = "asked for another route"
    REPLACING = "proposing another route"
    STREAM = "on the stream"  # the last one


class RouteMessage(enum.Enum):
    """Kinds of messages, as the table needs them."""

    PROPOSE = "Route of the opener"
    AGREE = "Route of the answerer to a channel"
    DECLINE = "Route of the answerer to the stream"
    REROUTE = "Reroute"
    SEALED = "Sealed"
    RECEIVED = "Received"
    CHUNK = "Chunk"


OPENER, ANSWERER = True, False
_EITHER = frozenset({OPENER, ANSWERER})
# Step -> messages that may be sent in it: each with its senders and the following step.
TRANSITIONS: dict[RouteStep, dict[RouteMessage, tuple[frozenset[bool], RouteStep]]] = {
    RouteStep.IDLE: {},
    RouteStep.UNROUTED: {
        RouteMessage.PROPOSE: (frozenset({OPENER}), RouteStep.PROPOSED),
        RouteMessage.SEALED: (_EITHER, RouteStep.UNROUTED),
    },
    RouteStep.PROPOSED: {
        RouteMessage.AGREE: (frozenset({ANSWERER}), RouteStep.CHANNEL),
        RouteMessage.DECLINE: (frozenset({ANSWERER}), RouteStep.STREAM),
        RouteMessage.SEALED: (_EITHER, RouteStep.PROPOSED),
    },
    RouteStep.CHANNEL: {
        RouteMessage.PROPOSE: (frozenset({OPENER}), RouteStep.REPLACING),
        RouteMessage.REROUTE: (frozenset({ANSWERER}), RouteStep.LOST),
        RouteMessage.SEALED: (_EITHER, RouteStep.CHANNEL),
        RouteMessage.RECEIVED: (_EITHER, RouteStep.CHANNEL),
    },
    RouteStep.LOST: {
        RouteMessage.PROPOSE: (frozenset({OPENER}), RouteStep.REPLACING),
        RouteMessage.SEALED: (_EITHER, RouteStep.LOST),
        RouteMessage.RECEIVED: (frozenset({OPENER}), RouteStep.LOST),
    },
    RouteStep.REPLACING: {
        RouteMessage.AGREE: (frozenset({ANSWERER}), RouteStep.CHANNEL),
        RouteMessage.DECLINE: (frozenset({ANSWERER}), RouteStep.STREAM),
        RouteMessage.REROUTE: (frozenset({ANSWERER}), RouteStep.REPLACING),
        RouteMessage.SEALED: (_EITHER, RouteStep.REPLACING),
        RouteMessage.RECEIVED: (frozenset({ANSWERER}), RouteStep.REPLACING),
    },
    RouteStep.STREAM: {
        RouteMessage.SEALED: (_EITHER, RouteStep.STREAM),
        RouteMessage.CHUNK: (_EITHER, RouteStep.STREAM),
    },
}


class Flow(Protocol):
    """One direction of a pipe, as far as an end knows it."""

    @property
    def is_open(self) -> bool:
        """Return whether the receiver lacks something that was announced."""

    @property
    def settled(self) -> int:
        """Return the bytes of the transfers that the receiver has whole."""

    @property
    def head_end(self) -> int:
        """Return where the oldest transfer that the receiver lacks ends; `settled` if it lacks none."""

    @property
    def is_head_sealed(self) -> bool:
        """Return whether that transfer's hash was sent, or none is needed."""

    @property
    def awaits_hash(self) -> bool:
        """Return whether there is a transfer whose hash was not sent yet."""


class Facts(NamedTuple):
    """The inputs of conditions, seen from the sender of a message."""

    step: RouteStep
    num_routes: int
    proposed: bytes | None
    """The channel that the opener has named."""
    channel: bytes | None
    """The channel in this message."""
    received: int
    """The position in this message."""
    sending: Flow
    """The direction in which the message's sender sends."""
    receiving: Flow
    """The direction in which it receives."""


Condition = tuple[str, Callable[[Facts], bool]]


def _can_resume(facts: Facts) -> bool:
    flow = facts.receiving
    if not flow.is_open:
        return facts.received == flow.settled
    return flow.settled <= facts.received < flow.head_end


_RESUMES: Condition = ("a Route from a position where its sender cannot be", _can_resume)
# Conditions that the table cannot express: each must hold, or the message is refused for the reason.
CONDITIONS: dict[RouteMessage, tuple[Condition, ...]] = {
    RouteMessage.PROPOSE: (
        ("a Route beyond those of a pipe", lambda facts: facts.num_routes < MAX_ROUTES),
        ("a Route that nobody needs", lambda facts: facts.step is not RouteStep.CHANNEL or facts.receiving.is_open),
        _RESUMES,
    ),
    RouteMessage.AGREE: (
        ("a channel that the opener has not named", lambda facts: facts.channel == facts.proposed),
        _RESUMES,
    ),
    RouteMessage.DECLINE: (_RESUMES,),
    RouteMessage.REROUTE: (("a Reroute by an end that lacks nothing", lambda facts: facts.receiving.is_open),),
    RouteMessage.SEALED: (("a second hash, or one of nothing", lambda facts: facts.sending.awaits_hash),),
    RouteMessage.RECEIVED: (
        ("Received by an end that lacks nothing", lambda facts: facts.receiving.is_open),
        ("Received before the other's hash was said", lambda facts: facts.receiving.is_head_sealed),
    ),
}


def problem_of(sent: RouteMessage, is_opener: bool, facts: Facts) -> str | None:
    """Return why an end may not send this now; None if it may."""
    senders, _ = TRANSITIONS[facts.step].get(sent, (frozenset[bool](), facts.step))
    if is_opener not in senders:
        return f"{sent.value} while the pipe is {facts.step.value}"
    return next((reason for reason, holds in CONDITIONS.get(sent, ()) if not holds(facts)), None)
