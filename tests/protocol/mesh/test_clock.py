from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.msgpack import encode

from farandole.protocol.mesh.clock import MAX_MESSAGE_BYTES, ClockAnswer, Offset, decode_clock, measure_offset
from farandole.protocol.wire.errors import RemoteProtocolError


def test_a_message_comes_back_as_it_was_and_fits() -> None:
    message = ClockAnswer(2**50)
    assert decode_clock(encode(message)) == message
    assert len(encode(message)) <= MAX_MESSAGE_BYTES


@given(st.binary(max_size=MAX_MESSAGE_BYTES))
def test_rubbish_is_a_message_or_the_peers_fault(payload: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        decode_clock(payload)


def test_what_is_out_of_range_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        decode_clock(encode(ClockAnswer(-1)))


def test_an_offset_is_that_of_the_middle_of_the_round_trip() -> None:
    assert measure_offset(100.0, 102.0, ClockAnswer(41_000)) == Offset(60.0, 1.0)
