from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.protocol.wire.errors import LocalProtocolError, RemoteProtocolError
from farandole.protocol.wire.framing import FrameParser, frame

MAX_BYTES = 64


@given(st.lists(st.binary(max_size=MAX_BYTES), max_size=8), st.integers(min_value=1, max_value=200))
def test_frames_come_out_as_they_went_in_however_the_stream_is_cut(payloads: list[bytes], size: int) -> None:
    wire = b"".join(frame(payload, MAX_BYTES) for payload in payloads)
    parser = FrameParser(MAX_BYTES)
    received: list[bytes] = []
    for start in range(0, len(wire), size):
        parser.receive_data(wire[start : start + size])
        received += iter(parser.next_frame, None)
    parser.receive_eof()
    assert received == payloads


@pytest.mark.parametrize("length", [MAX_BYTES + 1, 2**31, 2**32 - 1])
def test_a_lying_length_is_refused_at_its_fourth_byte(length: int) -> None:
    parser = FrameParser(MAX_BYTES)
    header = length.to_bytes(4, "big")
    parser.receive_data(header[:3])
    assert parser.next_frame() is None
    parser.receive_data(header[3:])
    with pytest.raises(RemoteProtocolError, match="at most 64"):
        parser.next_frame()


def test_an_end_inside_a_frame_is_the_peers_fault() -> None:
    parser = FrameParser(MAX_BYTES)
    parser.receive_data(frame(b"bonjour", MAX_BYTES)[:-1])
    assert parser.next_frame() is None
    with pytest.raises(RemoteProtocolError, match="ended"):
        parser.receive_eof()


def test_a_frame_too_long_to_send_is_our_own_fault() -> None:
    with pytest.raises(LocalProtocolError):
        frame(bytes(MAX_BYTES + 1), MAX_BYTES)
