"""Checkup: services of every node by which a peer checks its clock, whether UDP passes, and the speed of its line.

    clock   asker opens a stream; the answer is this node's clock, in one frame
    echo    asker opens a stream; the answer is a UDP port and a token; a datagram that is the token is sent back as is
    speed   asker names the direction; the answer is the number of bytes allowed; they flow until that or a time limit.
            Upwards the witness then reports how many bytes came in which time; downwards the asker measures that itself

The offset of a clock is known to within half the round trip (Cristian 1989). The echo answers any sender that has the
token, with the same number of bytes: nothing is amplified.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from ..wire.messagepack import MessageDecoder

CLOCK_PROTOCOL: Final = "/farandole/clock/1"
ECHO_PROTOCOL: Final = "/farandole/udp-echo/1"
SPEED_PROTOCOL: Final = "/farandole/speed/1"
# Half a second at 100 Mbit/s: enough for TCP to reach full speed on most lines, and little on a metered line.
MAX_SPEED_BYTES: Final = 6_000_000
# Ends the measurement on slow lines before all bytes have passed.
SPEED_SECONDS: Final = 4.0
MAX_MESSAGE_BYTES: Final = 64
TOKEN_BYTES: Final = 16


class ClockAnswer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The time by the witness's clock."""

    milliseconds: Annotated[int, msgspec.Meta(ge=0, le=2**50)]
    """Milliseconds since 1970, UTC."""


class EchoAnswer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The UDP port where the witness waits for a datagram, and the token that it must be."""

    port: Annotated[int, msgspec.Meta(ge=0, le=65_535)]
    """0: the witness is too busy."""
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


class SpeedRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A request to measure the speed in one direction."""

    is_up: bool
    """Whether the bytes go from the asker to the witness."""


class SpeedAnswer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The number of bytes that may be sent; in the last message, the number received."""

    size: Annotated[int, msgspec.Meta(ge=0, le=MAX_SPEED_BYTES)]
    """0: the witness is too busy."""
    milliseconds: Annotated[int, msgspec.Meta(ge=0, le=2**20)] = 0
    """Time from the first received byte to the last."""


decode_clock = MessageDecoder[ClockAnswer](ClockAnswer, "a clock's answer")
decode_echo = MessageDecoder[EchoAnswer](EchoAnswer, "an echo's answer")
decode_speed_request = MessageDecoder[SpeedRequest](SpeedRequest, "a request to measure the speed")
decode_speed = MessageDecoder[SpeedAnswer](SpeedAnswer, "an answer about the speed")


@dataclass(frozen=True, slots=True)
class Offset:
    """The time by which this node's clock is ahead of a peer's, in seconds."""

    seconds: float
    error: float
    """Upper bound of the error of ``seconds``."""


def measure_offset(asked_at: float, answered_at: float, answer: ClockAnswer) -> Offset:
    """Return the offset; ``asked_at`` and ``answered_at``: the round trip by this node's clock, Unix seconds."""
    half = (answered_at - asked_at) / 2
    return Offset(asked_at + half - answer.milliseconds / 1_000, half)
