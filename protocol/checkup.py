"""Small services of every node that tell a peer how it is off: the time, whether datagrams pass, how fast its line is.

    clock   asker opens a stream; the answer is this node's clock, in one frame
    echo    asker opens a stream; the answer is a UDP port and a token; a datagram that is the token comes back as it is

The offset of a clock is known to within half the round trip (Cristian 1989). An echo answers whoever shows the token,
with as many bytes as it got: nothing is amplified.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from .errors import RemoteProtocolError

CLOCK_PROTOCOL: Final = "/farandole/clock/1"
ECHO_PROTOCOL: Final = "/farandole/udp-echo/1"
MAX_MESSAGE_BYTES: Final = 64
TOKEN_BYTES: Final = 16


class ClockAnswer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the witness's clock says."""

    milliseconds: Annotated[int, msgspec.Meta(ge=0, le=2**50)]
    """Since 1970, UTC."""


class EchoAnswer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where the witness waits for a datagram."""

    port: Annotated[int, msgspec.Meta(ge=0, le=65_535)]
    """0: it has too much to do."""
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


_encoder = msgspec.msgpack.Encoder()
_clock_answers = msgspec.msgpack.Decoder(ClockAnswer)
_echo_answers = msgspec.msgpack.Decoder(EchoAnswer)


def encode(answer: ClockAnswer | EchoAnswer) -> bytes:
    """At most `MAX_MESSAGE_BYTES`."""
    return _encoder.encode(answer)


def decode_clock(payload: bytes) -> ClockAnswer:
    """`RemoteProtocolError` if it is none."""
    try:
        return _clock_answers.decode(payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RemoteProtocolError(f"not a time: {error}") from error


def decode_echo(payload: bytes) -> EchoAnswer:
    """`RemoteProtocolError` if it is none."""
    try:
        return _echo_answers.decode(payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RemoteProtocolError(f"not an offer to echo: {error}") from error


@dataclass(frozen=True, slots=True)
class Offset:
    """How far this node's clock is ahead of a peer's, in seconds."""

    seconds: float
    error: float
    """At most so far from the truth."""


def measure_offset(asked_at: float, answered_at: float, answer: ClockAnswer) -> Offset:
    """From both ends of the round trip by this node's clock, Unix seconds."""
    half = (answered_at - asked_at) / 2
    return Offset(asked_at + half - answer.milliseconds / 1_000, half)


def agreed_offset(offsets: Sequence[Offset]) -> float:
    """What most peers say: the median, since some of their clocks are wrong too."""
    return statistics.median(offset.seconds for offset in offsets)
