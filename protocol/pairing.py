"""Pairing: whom a node meets at the end of its round, agreed while its inner steps still run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoundStarted:
    """The trainer begins the inner steps of this round. Ends whatever was agreed for an earlier round."""

    round: int


@dataclass(frozen=True, slots=True)
class ContributionReady:
    """The trainer has ended the round's inner steps, and its contribution can be read."""

    round: int


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
class TimerFired:
    """The time of the newest `SetTimer` has come. Early or superfluous ones do no harm."""


@dataclass(frozen=True, slots=True)
class ExchangeEnded:
    """The exchange that `StartExchange` asked for is over, committed or not."""

    session: bytes
    committed: bool


@dataclass(frozen=True, slots=True)
class Stopped:
    """The node pauses or leaves: it meets nobody until its next `RoundStarted`."""


Event = (
    RoundStarted | ContributionReady | PeersChanged | MessageReceived | PeerLost | TimerFired | ExchangeEnded | Stopped
)


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send the payload to the peer, after all earlier ones to it; if that fails, come back with `PeerLost`."""

    peer: bytes
    payload: bytes


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Come back with `TimerFired` at this time (monotonic seconds). Replaces the timer that was set before."""

    at: float


@dataclass(frozen=True, slots=True)
class FinishRound:
    """The round's box in time is over: the trainer ends its inner steps after the one that runs."""

    round: int


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


@dataclass(frozen=True, slots=True)
class GoAlone:
    """Take this round's outer step alone; the reason is for people."""

    round: int
    reason: str


Output = SendMessage | SetTimer | FinishRound | StartExchange | GoAlone
