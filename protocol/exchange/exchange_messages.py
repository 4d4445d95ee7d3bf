"""Messages of an exchange (`farandole.protocol.exchange.exchange`): MessagePack, in the messages of its pipe.

They have no fields but these, since both partners must mean the same by a commit: any change of them needs another
protocol id.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Final

import msgspec

from ..run.outer_rules import Codec
from ..wire.errors import RemoteProtocolError
from ..wire.framing import LENGTH_BYTES
from ..wire.messagepack import PRINTABLE, MessageDecoder, Session
from .pipe import HEADER_BYTES, KIND_BYTES, MESSAGE_KIND

EXCHANGE_VERSION = 5
# An offer has about 160 bytes; an abort's reason at most 256 characters.
MAX_CONTROL_BYTES = 1_280
# 512 layers of the widest model in fp32 take less; compared with the node's own size before anything else.
MAX_CONTRIBUTION_BYTES = 2**44

_Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_CONTRIBUTION_BYTES)]
MAX_REASON_CHARS: Final = 256
Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS, pattern=PRINTABLE)]
"""Shown on terminals: no control characters."""


def reason_of(text: str) -> str:
    """Return a text as a `Reason`: cut to its length, with ``?`` for other characters."""
    return re.sub(r"[^\x20-\x7e]", "?", text[:MAX_REASON_CHARS])


class Offer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True, tag=1):
    """The contribution that the sender offers. All but the last three fields must equal the receiver's own offer."""

    version: Annotated[int, msgspec.Meta(ge=1, le=255)] = EXCHANGE_VERSION
    run_id: _Digest
    session: Session
    stage: Annotated[int, msgspec.Meta(ge=0, le=511)]
    layout: _Digest
    """Hash of the names, shapes and order of the tensors in a contribution."""
    codec: Codec
    size: Annotated[int, msgspec.Meta(ge=1, le=MAX_CONTRIBUTION_BYTES)]
    """Bytes of the contribution; follows from layout and codec."""
    # The next fields are the sender's own.
    round: _Count
    tokens: _Count
    """Tokens that the contribution was trained on: its weight in the mean. 0 and 1 in a round without inner steps."""
    seconds_left: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 0.0
    """Time until the sender goes on without its partner; set when it is sent. The lesser of both holds for both."""


class Accepted(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """The responder has the initiator's contribution, whole, and its screening accepts it."""


class Commit(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """The initiator's decision, which implies its own acceptance: both use the contribution that they have received."""


class Committed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    """The responder has read the decision."""


class Aborted(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=5):
    """Neither side uses a contribution: refused by the screening, out of time, or not expected."""

    reason: Reason


Control = Offer | Accepted | Commit | Committed | Aborted


_decode = MessageDecoder[Control](Control, "a message of an exchange")


def decode_control(payload: bytes) -> Control:
    """Decode a message; raise `RemoteProtocolError` if it is none."""
    message = _decode(payload)
    if isinstance(message, Offer) and not math.isfinite(message.seconds_left):  # NaN passes every bound
        raise RemoteProtocolError(f"not a duration: {message.seconds_left}")
    return message


def peek_offer(data: bytes | bytearray) -> Offer | None:
    """Return the offer with which a stream begins, or None until more bytes arrive.

    A responder learns from it which session the stream belongs to; the same bytes then go into its `Exchange`.
    """
    if len(data) < HEADER_BYTES:
        return None
    length = int.from_bytes(data[:LENGTH_BYTES], "big")
    if data[LENGTH_BYTES] != MESSAGE_KIND or not KIND_BYTES < length <= KIND_BYTES + MAX_CONTROL_BYTES:
        raise RemoteProtocolError("an exchange begins with an offer")
    if len(data) < LENGTH_BYTES + length:
        return None
    offer = decode_control(bytes(data[HEADER_BYTES : LENGTH_BYTES + length]))
    if not isinstance(offer, Offer):
        raise RemoteProtocolError("an exchange begins with an offer")
    return offer
