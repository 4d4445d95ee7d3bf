"""How far each of two partners is in an exchange, and what it may send when: a table."""

from __future__ import annotations

import enum
from typing import Literal

from .exchange_messages import Aborted, Accepted, Commit, Committed, Control, Received, Reroute, Route, Sealed


class Step(enum.Enum):
    """How far one of the two is, in what it has sent."""

    OFFERING = "offering"
    ROUTING = "routing"  # it has offered a large contribution
    ROUTED = "routed"  # it has said how it would move it
    SENDING = "sending"  # its chunks
    MOVING = "moving"  # its contribution over the channel, or the other's is not here yet
    JUDGING = "judging"  # it has sent its contribution, and screens the other's
    ACCEPTED = "accepted"
    COMMITTED = "committed"
    ABORTED = "aborted"


class Sent(enum.Enum):
    """Kinds of messages, as the table needs them."""

    OFFER = "Offer"
    LARGE_OFFER = "large Offer"
    ROUTE = "Route"
    REROUTE = "Reroute"
    SEALED = "Sealed"
    RECEIVED = "Received"
    CHUNK = "Chunk"
    LAST_CHUNK = "last Chunk"
    ACCEPTED = "Accepted"
    COMMIT = "Commit"
    COMMITTED = "Committed"
    ABORTED = "Aborted"


Role = Literal["initiator", "responder"]
_BOTH: dict[Step, dict[Sent, Step]] = {
    Step.OFFERING: {Sent.OFFER: Step.SENDING, Sent.LARGE_OFFER: Step.ROUTING, Sent.ABORTED: Step.ABORTED},
    Step.ROUTING: {Sent.ROUTE: Step.ROUTED, Sent.SEALED: Step.ROUTING, Sent.ABORTED: Step.ABORTED},
    Step.ROUTED: {  # and the responder's Route takes both on
        Sent.SEALED: Step.ROUTED,
        Sent.ABORTED: Step.ABORTED,
    },
    Step.MOVING: {  # and the second Received takes both on
        Sent.ROUTE: Step.ROUTED,
        Sent.SEALED: Step.MOVING,
        Sent.RECEIVED: Step.MOVING,
        Sent.ABORTED: Step.ABORTED,
    },
    Step.SENDING: {
        Sent.CHUNK: Step.SENDING,
        Sent.SEALED: Step.SENDING,
        Sent.LAST_CHUNK: Step.JUDGING,  # after Sealed
        Sent.ABORTED: Step.ABORTED,
    },
    Step.COMMITTED: {},
    Step.ABORTED: {},
}
# What each role may send when, and where that takes it. After its Accepted a responder cannot back out.
TRANSITIONS: dict[Role, dict[Step, dict[Sent, Step]]] = {
    "initiator": _BOTH
    | {
        Step.JUDGING: {Sent.COMMIT: Step.COMMITTED, Sent.ABORTED: Step.ABORTED},
        Step.ACCEPTED: {},
    },
    "responder": _BOTH
    | {
        Step.MOVING: _BOTH[Step.MOVING] | {Sent.REROUTE: Step.MOVING},
        Step.JUDGING: {Sent.ACCEPTED: Step.ACCEPTED, Sent.ABORTED: Step.ABORTED},
        Step.ACCEPTED: {Sent.COMMITTED: Step.COMMITTED},
    },
}
# Where the other one must be for a message to make sense.
REQUIRES: dict[Role, dict[Sent, frozenset[Step]]] = {
    "initiator": {
        Sent.ROUTE: frozenset({Step.ROUTING, Step.MOVING}),
        Sent.RECEIVED: frozenset({Step.MOVING}),
        Sent.COMMIT: frozenset({Step.ACCEPTED}),
    },
    "responder": {
        Sent.OFFER: frozenset({Step.SENDING, Step.JUDGING}),
        Sent.LARGE_OFFER: frozenset({Step.ROUTING}),
        Sent.ROUTE: frozenset({Step.ROUTED}),
        Sent.REROUTE: frozenset({Step.MOVING, Step.ROUTED}),  # it may cross the initiator's own Route
        Sent.RECEIVED: frozenset({Step.MOVING, Step.ROUTED}),  # and so may this
        Sent.ACCEPTED: frozenset({Step.JUDGING}),  # it has sent everything
        Sent.COMMITTED: frozenset({Step.COMMITTED}),
    },
}

# But for `Offer`, which is one of two.
SENT_OF: dict[type[Control], Sent] = {
    Route: Sent.ROUTE,
    Reroute: Sent.REROUTE,
    Sealed: Sent.SEALED,
    Received: Sent.RECEIVED,
    Accepted: Sent.ACCEPTED,
    Commit: Sent.COMMIT,
    Committed: Sent.COMMITTED,
    Aborted: Sent.ABORTED,
}
