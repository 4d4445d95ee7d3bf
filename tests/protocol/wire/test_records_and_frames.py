"""Records and frames: what arrives in pieces comes out whole, and nothing else does."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.protocol.run.invite import cipher_of
from farandole.protocol.wire.errors import LocalProtocolError, RemoteProtocolError
from farandole.protocol.wire.framing import FrameParser, frame
from farandole.protocol.wire.record_layer import (
    BYTES_PER_KEY,
    HEADER_BYTES,
    MAX_SEALED_BYTES,
    NEXT_KEY,
    OVERHEAD_BYTES,
    RECORD_BYTES,
    TAG_BYTES,
    Opener,
    Sealer,
)

SECRET = bytes(range(32))
SIZES = [1, 15, 16, 17, 4_096, RECORD_BYTES - 1, RECORD_BYTES]


def seal(sealer: Sealer, data: bytes, now: float = 0.0) -> bytes:
    return bytes(sealer.seal(memoryview(data), now))


def sealer_of(max_records: int = 1 << 20) -> Sealer:
    """Return a sealer each of whose keys seals ``max_records`` of `RECORDS`."""
    return Sealer(SECRET, 0.0, max_bytes=bytes_of(max_records))


def opener_of(max_records: int, secret: bytes = SECRET) -> Opener:
    return Opener(secret, max_bytes=bytes_of(max_records))


def bytes_of(num_records: int) -> int:
    return num_records * (len(RECORDS[0]) + OVERHEAD_BYTES)


def feed(opener: Opener, wire: bytes, most: int = MAX_SEALED_BYTES) -> int:
    """Give the opener the bytes that it wants, at most ``most``; return their number."""
    piece = wire[: min(most, len(opener.wanted))]
    opener.wanted[: len(piece)] = piece
    opener.received(len(piece))
    return len(piece)


def read(opener: Opener, wire: bytes, at_a_time: Sequence[int] = (RECORD_BYTES,), room: int = RECORD_BYTES) -> bytes:
    """Return all verified plaintext of the wire, which arrives in pieces of these sizes."""
    plain, memory, pieces = bytearray(), memoryview(bytearray(room)), itertools.cycle(at_a_time)
    while True:
        if taken := opener.take(memory):
            plain += memory[:taken]
        elif wire:
            wire = wire[feed(opener, wire, next(pieces)) :]
        else:
            return bytes(plain)


@given(
    st.lists(st.binary(min_size=1, max_size=100), max_size=8),
    st.lists(st.integers(1, 150), min_size=1, max_size=8),
    st.integers(1, 120),
    st.integers(1, 4),
)
def test_however_it_is_cut_it_is_the_same(
    sent: list[bytes], pieces: list[int], room: int, records_per_key: int
) -> None:
    sealer, opener = sealer_of(records_per_key), opener_of(records_per_key)
    wire = b"".join(seal(sealer, data) for data in sent)
    assert read(opener, wire, pieces, room) == b"".join(sent)
    assert opener.is_clean


def test_no_more_is_wanted_than_the_record_and_the_next_header() -> None:
    opener, wire = Opener(SECRET), seal(sealer_of(), bytes(1_000))
    assert len(opener.wanted) == HEADER_BYTES
    feed(opener, wire)
    assert opener.take(memoryview(bytearray(1))) == 0
    assert len(opener.wanted) == len(wire)


@pytest.mark.parametrize("flag", [0, NEXT_KEY])
@pytest.mark.parametrize("length", [0, 1, TAG_BYTES - 1, RECORD_BYTES + TAG_BYTES + 1, 2**30, 2**31 - 1])
def test_a_length_is_refused_before_anything_is_read_or_allocated(length: int, flag: int) -> None:
    opener = Opener(SECRET)
    feed(opener, (length | flag).to_bytes(HEADER_BYTES, "big"))
    buffer = opener.wanted.obj
    with pytest.raises(RemoteProtocolError):
        opener.take(memoryview(bytearray(10)))
    assert opener.wanted.obj is buffer


RECORDS = [f"record {number}".encode() for number in range(4)]


def sealed() -> list[bytes]:
    sealer = sealer_of(3)
    return [seal(sealer, data) for data in RECORDS]


def assert_ends_after(num_good: int, wire: bytes, secret: bytes = SECRET) -> None:
    """Assert that the first ``num_good`` records count, and nothing after them, whatever is tried."""
    opener, plain, memory = opener_of(3, secret), b"", memoryview(bytearray(100))
    good = b"".join(RECORDS[:num_good])
    try:
        while wire:
            if taken := opener.take(memory):
                plain += memory[:taken]
            else:
                wire = wire[feed(opener, wire) :]
        while taken := opener.take(memory):
            plain += memory[:taken]
    except RemoteProtocolError:
        for _ in range(2):
            with pytest.raises(RemoteProtocolError):
                opener.take(memory)
    assert plain == good
    assert not opener.is_clean


@pytest.mark.parametrize("number", range(4))
def test_a_flipped_bit_ends_it(number: int) -> None:
    whole = sealed()
    for bit in range(8 * len(whole[number])):
        record = bytearray(whole[number])
        record[bit // 8] ^= 1 << bit % 8
        assert_ends_after(number, b"".join([*whole[:number], record, *whole[number + 1 :]]))


@pytest.mark.parametrize("number", range(3))
def test_a_dropped_a_repeated_and_a_swapped_record_end_it(number: int) -> None:
    whole = sealed()
    assert_ends_after(number, b"".join(whole[:number] + whole[number + 1 :]))
    assert_ends_after(number + 1, b"".join(whole[: number + 1] + whole[number:]))
    assert_ends_after(number, b"".join([*whole[:number], whole[number + 1], whole[number], *whole[number + 2 :]]))


def test_a_record_of_another_channel_or_direction_ends_it() -> None:
    assert_ends_after(0, b"".join(sealed()), secret=bytes(32))


@given(st.integers(1, 200))
def test_a_truncated_record_never_counts(cut: int) -> None:
    whole = b"".join(sealed())[:-cut]
    opener = opener_of(3)
    plain = read(opener, whole)
    assert b"".join(RECORDS).startswith(plain)
    assert len(plain) % len(RECORDS[0]) == 0
    assert opener.is_clean == (len(whole) % len(sealed()[0]) == 0)


@given(st.binary(max_size=300), st.integers(0, 4), st.lists(st.integers(1, 50), min_size=1, max_size=4))
def test_strange_bytes_never_count(strange: bytes, num_good: int, pieces: list[int]) -> None:
    opener = opener_of(3)
    assert read(opener, b"".join(sealed()[:num_good]), pieces) == b"".join(RECORDS[:num_good])
    try:
        assert read(opener, strange, pieces) == b""
    except RemoteProtocolError:
        assert strange


@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(1, 20))
def test_both_ends_change_keys_alike(records_per_key: int, num_records: int) -> None:
    sealer, opener = sealer_of(records_per_key), opener_of(records_per_key)
    is_first = []
    for number in range(num_records):
        wire = seal(sealer, RECORDS[number % 4])
        is_first.append(bool(int.from_bytes(wire[:HEADER_BYTES], "big") & NEXT_KEY))
        assert read(opener, wire) == RECORDS[number % 4]
    assert is_first == [number > 0 and number % records_per_key == 0 for number in range(num_records)]


def test_a_key_that_has_been_used_long_enough_seals_nothing_more_and_who_uses_it_for_longer_is_refused() -> None:
    sealer, opener = Sealer(SECRET, 0.0, max_seconds=10.0), Opener(SECRET)
    wires = [seal(sealer, b"data", now) for now in (0.0, 9.9, 10.0, 19.9, 20.0, 1_000.0)]
    assert [bool(wire[0] & 0x80) for wire in wires] == [False, False, True, False, True, True]
    assert read(opener, b"".join(wires)) == b"data" * 6
    sealer, opener = sealer_of(3), opener_of(2)
    assert read(opener, b"".join(seal(sealer, data) for data in RECORDS[:2])) == RECORDS[0] + RECORDS[1]
    with pytest.raises(RemoteProtocolError, match="sealed enough"):
        read(opener, seal(sealer, RECORDS[2]))


@pytest.mark.parametrize("number", [0, 2, 3])
def test_the_length_of_an_empty_record_is_authenticated(number: int) -> None:
    whole = sealed()
    record = TAG_BYTES.to_bytes(HEADER_BYTES, "big") + whole[number][-TAG_BYTES:]
    assert_ends_after(number, b"".join([*whole[:number], record, *whole[number + 1 :]]))


def test_a_final_record_is_told_from_a_connection_that_was_cut_off_and_nothing_follows_it() -> None:
    sealer, opener = sealer_of(), Opener(SECRET)
    wire = seal(sealer, b"data")
    assert read(opener, wire) == b"data"
    assert not opener.has_ended
    assert opener.is_clean
    final = bytes(sealer.finish(0.0))
    assert len(final) == OVERHEAD_BYTES
    assert read(opener, final + b"x") == b""
    assert opener.has_ended
    assert not opener.is_clean
    with pytest.raises(LocalProtocolError):
        seal(sealer, b"data")
    with pytest.raises(LocalProtocolError):
        sealer.finish(0.0)
    with pytest.raises(RemoteProtocolError, match="after the final record"):
        read(opener, b"")
    assert opener.has_ended


@pytest.mark.parametrize("number", range(4))
def test_a_final_record_of_another_turn_ends_nothing_well(number: int) -> None:
    """An attacker that cuts records out and sends the final one early is detected."""
    sealer = sealer_of()
    wires = [seal(sealer, data) for data in RECORDS]
    final = bytes(sealer.finish(0.0))
    opener = Opener(SECRET)
    with pytest.raises(RemoteProtocolError):
        read(opener, b"".join(wires[:number]) + final)
    assert not opener.has_ended


def test_a_key_is_used_within_its_limits() -> None:
    blocks = BYTES_PER_KEY // 16
    assert blocks <= 2**34.5, "RFC 8446, 5.5: 2^24.5 records of 2^14 bytes"
    assert blocks <= 2**35, "RFC 9001, B.1.1"
    assert RECORD_BYTES <= 2**36 - 32, "NIST SP 800-38D, 5.2.1.1"
    assert MAX_SEALED_BYTES <= BYTES_PER_KEY


def test_hidden_headers_show_no_lengths_and_all_else_stays() -> None:
    key, nonce = b"k" * 32, b"n" * 32
    plain, hiding = sealer_of(), Sealer(SECRET, 0.0, hiding=cipher_of(key, nonce))
    stream, wire = cipher_of(key, nonce), b""
    for size in SIZES:
        record, hidden = seal(plain, bytes(size)), seal(hiding, bytes(size))
        assert hidden == stream.update(record[:HEADER_BYTES]) + record[HEADER_BYTES:]
        wire += hidden
    opener = Opener(SECRET, hiding=cipher_of(key, nonce))
    assert read(opener, wire, at_a_time=(1, 3, 100_000)) == bytes(sum(SIZES))
    with pytest.raises(RemoteProtocolError):
        read(Opener(SECRET, hiding=cipher_of(key, b"x" * 32)), wire)


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
