from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.msgpack import encode

from farandole.protocol.mesh.checkup import (
    MAX_MESSAGE_BYTES,
    MAX_SPEED_BYTES,
    TOKEN_BYTES,
    ClockAnswer,
    EchoAnswer,
    Offset,
    SpeedAnswer,
    SpeedRequest,
    decode_clock,
    decode_echo,
    decode_speed,
    decode_speed_request,
    measure_offset,
)
from farandole.protocol.wire.errors import RemoteProtocolError

DECODERS: list[Callable[[bytes], Struct]] = [decode_clock, decode_echo, decode_speed_request, decode_speed]


@pytest.mark.parametrize(
    ("message", "decode"),
    [
        (ClockAnswer(2**50), DECODERS[0]),
        (EchoAnswer(65_535, bytes(TOKEN_BYTES)), DECODERS[1]),
        (SpeedRequest(True), DECODERS[2]),
        (SpeedAnswer(MAX_SPEED_BYTES, 2**20), DECODERS[3]),
    ],
)
def test_messages_come_back_as_they_were_and_fit(message: Struct, decode: Callable[[bytes], Struct]) -> None:
    assert decode(encode(message)) == message
    assert len(encode(message)) <= MAX_MESSAGE_BYTES


@given(st.binary(max_size=MAX_MESSAGE_BYTES), st.sampled_from(DECODERS))
def test_rubbish_is_a_message_or_the_peers_fault(payload: bytes, decode: Callable[[bytes], Struct]) -> None:
    with contextlib.suppress(RemoteProtocolError):
        decode(payload)


@pytest.mark.parametrize("bad", [ClockAnswer(-1), EchoAnswer(1, b"short"), SpeedAnswer(MAX_SPEED_BYTES + 1)])
def test_what_is_out_of_range_is_refused(bad: Struct) -> None:
    for decode in DECODERS:
        with pytest.raises(RemoteProtocolError):
            decode(encode(bad))


def test_an_offset_is_that_of_the_middle_of_the_round_trip() -> None:
    assert measure_offset(100.0, 102.0, ClockAnswer(41_000)) == Offset(60.0, 1.0)
