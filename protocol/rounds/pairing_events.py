"""Events, outputs and states of pairing.

`farandole.protocol.rounds.pairing` decides; a driver passes it the events and carries out the outputs.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from ..trainer.trainer_messages import FinishRound, UseFragment
from ..wire.timers import SetTimer, TimerFired


@dataclass(frozen=True, slots=True)
class RoundStarted:
    """The trainer begins the inner steps of this round. Ends any agreement for an earlier round, but no exchange."""

    round: int
    at: float | None = None
    """When it began, if that was earlier than now."""


@dataclass(frozen=True, slots=True)
class ContributionReady:
    """The round's inner steps have ended; its contribution, of this fragment, is encoded while it is sent."""

    round: int
    fragment: int = 0
    step_seconds: float = 0.0
    """Of an inner step; 0: not known."""


@dataclass(frozen=True, slots=True)
class PeersChanged:
    """The live peers of this node's stage, by public key, without itself: the whole set, not a change to it."""

    peers: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A pairing message came in, from the peer that the connection authenticated."""

    peer: bytes
    payload: bytes


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The connection to a peer is gone, or a message to it was not delivered."""

    peer: bytes


@dataclass(frozen=True, slots=True)
class ExchangeEnded:
    """The exchange that `StartExchange` asked for is over, committed or not; also where it overlapped with a round."""

    session: bytes
    peer: bytes
    committed: bool
    """Whether to use the partner's contribution; then all of it is in the incoming memory."""
    is_broken: bool = False
    """It was not committed, and neither side refused a contribution: another peer may do."""
    reason: str = ""
    """Why it was not committed, for people; empty if it was."""
    round: int = 0
    """This node's own."""
    partner_round: int = 0
    """Round, tokens and bytes of the partner's contribution; 0 if it was not committed."""
    partner_tokens: int = 0
    partner_size: int = 0
    partner_digest: bytes = b""
    """BLAKE3 of that contribution."""
    bytes_sent: int = 0
    """Bytes on the stream, framing included, and on the channel."""
    bytes_received: int = 0
    seconds: float = 0.0
    path: str = ""
    """``bulk`` if the contributions moved, or were to move, over a bulk channel, else ``stream``."""
    late_seconds: float = 0.0
    """See `farandole.protocol.trainer.trainer_messages.Screened.late_seconds`."""
    clip: float = 1.0
    """How far the mean moves towards the partner's contribution; 0: nothing of it is averaged."""


@dataclass(frozen=True, slots=True)
class TrafficSaved:
    """The node's traffic limit stops exchanges, or no longer does: while it is on, the node trains on alone.

    A partner that is agreed on is met all the same.
    """

    is_on: bool


@dataclass(frozen=True, slots=True)
class Stopped:
    """The node pauses or leaves: it meets no peer until its next `RoundStarted`."""


Event = (
    RoundStarted
    | ContributionReady
    | PeersChanged
    | MessageReceived
    | PeerLost
    | TimerFired
    | ExchangeEnded
    | TrafficSaved
    | Stopped
)


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send the payload to the peer, after all earlier ones to it; if that fails, come back with `PeerLost`."""

    peer: bytes
    payload: bytes


@dataclass(frozen=True, slots=True)
class StartExchange:
    """Both contributions are ready: exchange them, and come back with `ExchangeEnded` by the deadline."""

    session: bytes
    peer: bytes
    round: int
    is_initiator: bool
    """Whether this node opens the stream; the other one awaits it."""
    deadline: float
    """Monotonic seconds at which this node goes on, with or without its partner."""
    offer_by: float = math.inf
    """Monotonic seconds at which the exchange has failed if the partner has sent no offer."""


def failure(reason: str) -> str:
    """Return the reason for a round that is taken alone because its exchange failed."""
    return f"the exchange failed: {reason}" if reason else "the exchange failed"


@dataclass(frozen=True, slots=True)
class GoAlone:
    """Take this round's outer step alone; ``reason`` is for people."""

    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class Missed:
    """A peer agreed to be this round's partner, and was not ready for as long as this node waited."""

    peer: bytes


Output = SendMessage | SetTimer | UseFragment | FinishRound | StartExchange | GoAlone | Missed
"""`UseFragment` and `FinishRound` are commands for the trainer. A `UseFragment` replaces the round's earlier one."""


class State(enum.Enum):
    """A node's state within its round."""

    IDLE = "idle"  # no round runs, or its outcome is known
    SEEKING = "seeking"  # no partner, no proposal outstanding
    PROPOSED = "proposed"  # a proposal awaits its answer
    MATCHED = "matched"  # a partner is agreed on; one of both is not ready yet
    EXCHANGING = "exchanging"
    AWAY = "away"  # paused or leaving


_AT_ANY_TIME = frozenset({State.SEEKING, State.AWAY})  # a round starts, or the node stops
# The life of a round: state -> the states that may follow. Any other step is our defect.
FOLLOWING: dict[State, frozenset[State]] = {
    State.IDLE: _AT_ANY_TIME,
    State.SEEKING: _AT_ANY_TIME | {State.PROPOSED, State.MATCHED, State.IDLE},  # idle: it goes on alone
    State.PROPOSED: _AT_ANY_TIME | {State.MATCHED},
    State.MATCHED: _AT_ANY_TIME | {State.EXCHANGING},
    State.EXCHANGING: _AT_ANY_TIME | {State.IDLE},  # seeking again: it broke, and there is time for another partner
    State.AWAY: _AT_ANY_TIME,
}
