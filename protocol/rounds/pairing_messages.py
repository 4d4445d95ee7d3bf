"""The messages by which two nodes become partners: seven small MessagePack arrays with a tag.

A later release may append fields that older nodes can do without: these skip them. Any other change, such as a new
message, needs another protocol id.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

from ..wire.errors import RemoteProtocolError
from ..wire.messagepack import MessageDecoder, Session, encode

# The longest message, a proposal, has 29 bytes; the rest is room for one more field.
MAX_MESSAGE_BYTES = 64
# Messages taken from one peer at once, and a second. An honest one sends its proposals and answers, a few a round, and
# asks a busy peer at most every 0.05 s.
MAX_MESSAGES = 64

# A box is at most a day (`RoundConfig.round_seconds`) and is moved by at most half its length.
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1.5 * 86_400)]


class _OfSession(msgspec.Struct, frozen=True, array_like=True):
    session: Session


class Propose(_OfSession, frozen=True, tag=1):
    """Ask a peer to be the partner at the end of this round."""

    seconds_left: _Seconds | None
    """Until the sender's inner steps end: 0 once they have, None while it cannot tell."""


class Agree(_OfSession, frozen=True, tag=2):
    """Accept a proposal: both are partners now."""

    seconds_left: _Seconds | None
    """As in `Propose`, but until the sender's inner steps would have ended without this agreement."""


class Decline(_OfSession, frozen=True, tag=3):
    """Decline a proposal for this round."""

    reason: Literal["matched", "away", "fragment"]
    """``matched``: the sender has a partner; ``away``: it pauses, leaves or saves its traffic; ``fragment``: another
    fragment is ready."""


class Busy(_OfSession, frozen=True, tag=4):
    """Decline for now: the peer asks another, or this node again later."""

    retry_after: _Seconds


class Withdraw(_OfSession, frozen=True, tag=5):
    """The proposal or the agreement no longer holds. Never answered."""


class Ready(_OfSession, frozen=True, tag=6):
    """The sender's contribution is ready to be exchanged."""


class Begin(_OfSession, frozen=True, tag=7):
    """Both are ready, and the sender, which proposed, opens the stream of the exchange."""


Message = Propose | Agree | Decline | Busy | Withdraw | Ready | Begin

encode_message = encode
"""Encode a message, in at most `MAX_MESSAGE_BYTES`."""
_decode = MessageDecoder[Message](Message, "a pairing message", MAX_MESSAGE_BYTES)


def decode_message(payload: bytes) -> Message:
    """Parse a message; raise `RemoteProtocolError` if it is malformed."""
    message = _decode(payload)
    values = msgspec.structs.astuple(message)
    if any(isinstance(value, float) and math.isnan(value) for value in values):  # which passes every bound
        raise RemoteProtocolError("not a duration: NaN")
    return message
