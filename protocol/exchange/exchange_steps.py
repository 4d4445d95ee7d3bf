"""The steps of two partners in an exchange, and the messages allowed in each: a table.

The pipe decides how the contributions move (`farandole.protocol.exchange.pipe_steps` has its table). An exchange needs
only one fact about that for each partner: the other side has its contribution, whole and with its hash.
"""

from __future__ import annotations

import enum
from typing import Literal

from .exchange_messages import Aborted, Accepted, Commit, Committed, Control, Offer


class Step(enum.Enum):
    """The step of one partner, by what it has sent."""

    OFFERING = "offering"
    MOVING = "sending its contribution"
    JUDGING = "judging"  # the other has its contribution, and it screens the other's
    ACCEPTED = "accepted"
    COMMITTED = "committed"
    ABORTED = "aborted"


class Sent(enum.Enum):
    """Kinds of messages, as the table distinguishes them."""

    OFFER = "Offer"
    CONTRIBUTION = "the contribution"  # all of it, as the pipe reports
    ACCEPTED = "Accepted"
    COMMIT = "Commit"
    COMMITTED = "Committed"
    ABORTED = "Aborted"


Role = Literal["initiator", "responder"]
_BOTH: dict[Step, dict[Sent, Step]] = {
    Step.OFFERING: {Sent.OFFER: Step.MOVING, Sent.ABORTED: Step.ABORTED},
    Step.MOVING: {Sent.CONTRIBUTION: Step.JUDGING, Sent.ABORTED: Step.ABORTED},
    Step.COMMITTED: {},
    Step.ABORTED: {},
}
# Role -> step of the sender -> kind -> its next step. After its Accepted a responder cannot back out.
TRANSITIONS: dict[Role, dict[Step, dict[Sent, Step]]] = {
    "initiator": _BOTH
    | {
        Step.JUDGING: {Sent.COMMIT: Step.COMMITTED, Sent.ABORTED: Step.ABORTED},
        Step.ACCEPTED: {},
    },
    "responder": _BOTH
    | {
        Step.JUDGING: {Sent.ACCEPTED: Step.ACCEPTED, Sent.ABORTED: Step.ABORTED},
        Step.ACCEPTED: {Sent.COMMITTED: Step.COMMITTED},
    },
}
# Role -> kind -> steps in which the other side must be for the message to be valid.
REQUIRES: dict[Role, dict[Sent, frozenset[Step]]] = {
    "initiator": {
        Sent.COMMIT: frozenset({Step.ACCEPTED}),
    },
    "responder": {
        Sent.OFFER: frozenset({Step.MOVING}),
        Sent.ACCEPTED: frozenset({Step.JUDGING}),  # it has sent everything
        Sent.COMMITTED: frozenset({Step.COMMITTED}),
    },
}

SENT_OF: dict[type[Control], Sent] = {
    Offer: Sent.OFFER,
    Accepted: Sent.ACCEPTED,
    Commit: Sent.COMMIT,
    Committed: Sent.COMMITTED,
    Aborted: Sent.ABORTED,
}
# Fields of an offer that must be equal in both; otherwise there is no session.
AGREED_FIELDS = ("version", "run_id", "session", "stage", "layout", "codec", "size")
