"""Outcomes of an initiator's sessions, and the messages to query them (see `farandole.protocol.exchange.exchange`)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

import msgspec

from ..wire.errors import RemoteProtocolError
from ..wire.framing import FrameParser, frame
from ..wire.messagepack import MessageDecoder, Session, encode

# Sessions whose outcome an initiator remembers. It has one a round, and peers ask about it for exchange_seconds.
MAX_OUTCOMES = 1_024


Outcome = Literal["undecided", "committed", "aborted"]


class Outcomes:
    """The initiator's decisions on its newest `MAX_OUTCOMES` sessions, for responders in doubt."""

    def __init__(self) -> None:
        self._outcomes: OrderedDict[bytes, tuple[bytes, Outcome]] = OrderedDict()

    def begin(self, session: bytes, peer: bytes) -> None:
        """Note that a session with this peer is under way, undecided."""
        self._outcomes[session] = (peer, "undecided")
        if len(self._outcomes) > MAX_OUTCOMES:
            self._outcomes.popitem(last=False)

    def decide(self, session: bytes, committed: bool) -> bool:
        """Decide a session; the first decision holds. Returns whether the session is committed."""
        peer, outcome = self._outcomes.get(session, (b"", "aborted"))
        if outcome == "undecided":
            outcome = "committed" if committed else "aborted"
            self._outcomes[session] = (peer, outcome)
        return outcome == "committed"

    def answer(self, session: bytes, peer: bytes) -> Outcome:
        """Return the outcome for a peer that asks about a session. An unknown session was never committed."""
        partner, outcome = self._outcomes.get(session, (peer, "aborted"))
        if partner != peer:
            raise RemoteProtocolError("a question about a session of two others")
        return outcome


class Resolve(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The question of a responder in doubt to its initiator, on a separate stream."""

    session: Session


class Resolution(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The answer; after ``undecided`` the responder asks again."""

    outcome: Outcome


MAX_RESOLVE_BYTES = 64


def encode_resolve(message: Resolve | Resolution) -> bytes:
    """Encode the frame of a question or its answer."""
    return frame(encode(message), MAX_RESOLVE_BYTES)


def resolve_parser() -> FrameParser:
    """Make a parser that cuts a stream of questions and answers into frames."""
    return FrameParser(MAX_RESOLVE_BYTES)


decode_resolve = MessageDecoder[Resolve](Resolve, "a question about a session")
decode_resolution = MessageDecoder[Resolution](Resolution, "an answer about a session")
