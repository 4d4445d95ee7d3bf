"""Small services of every node that tell a peer how it is off: the time, whether datagrams pass, how fast its line is.

    clock   asker opens a stream; the answer is this node's clock, in one frame
    echo    asker opens a stream; the answer is a UDP port and a token; a datagram that is the token comes back as it is
    speed   asker says which way; the answer is how many bytes may flow; they do, until they end or the time is over.
            Upwards the witness then says how many came in which time; downwards the asker sees for itself

The offset of a clock is known to within half the round trip (Cristian 1989). An echo answers whoever shows the token,
with as many bytes as it got: nothing is amplified.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from .wire import MessageDecoder

CLOCK_PROTOCOL: Final = "/farandole/clock/1"
ECHO_PROTOCOL: Final = "/farandole/udp-echo/1"
SPEED_PROTOCOL: Final = "/farandole/speed/1"
# Half a second of 100 Mbit/s: enough for TCP to get up to speed on most lines, and little on anybody's bill.
MAX_SPEED_BYTES: Final = 6_000_000
# On slow lines fewer bytes will do.
SPEED_SECONDS: Final = 4.0
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


class SpeedRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Let bytes flow."""

    is_up: bool
    """From the asker to the witness."""


class SpeedAnswer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How many bytes may flow; in the end, how many came."""

    size: Annotated[int, msgspec.Meta(ge=0, le=MAX_SPEED_BYTES)]
    """0: the witness has too much to do."""
    milliseconds: Annotated[int, msgspec.Meta(ge=0, le=2**20)] = 0
    """From the first of those that came to the last."""


decode_clock = MessageDecoder[ClockAnswer](ClockAnswer, "a clock's answer")
decode_echo = MessageDecoder[EchoAnswer](EchoAnswer, "an echo's answer")
decode_speed_request = MessageDecoder[SpeedRequest](SpeedRequest, "a request to measure the speed")
decode_speed = MessageDecoder[SpeedAnswer](SpeedAnswer, "an answer about the speed")


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
