"""The time of a node, by which a peer checks its own clock.

The asker opens a stream; the answer is this node's clock, in one frame. The offset of a clock is known to within half
the round trip (Cristian 1989).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from ..wire.messagepack import MessageDecoder

CLOCK_PROTOCOL: Final = "/farandole/clock/1"
MAX_MESSAGE_BYTES: Final = 64


class ClockAnswer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The time by the witness's clock."""

    milliseconds: Annotated[int, msgspec.Meta(ge=0, le=2**50)]
    """Milliseconds since 1970, UTC."""


decode_clock = MessageDecoder[ClockAnswer](ClockAnswer, "a clock's answer")


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
