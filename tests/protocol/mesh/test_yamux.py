"""Yamux without I/O: two machines connected by hand, and one fed with arbitrary bytes."""

import itertools
import struct
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.protocol.mesh import yamux
from farandole.protocol.wire.errors import LocalProtocolError, RemoteProtocolError

DATA, WINDOW_UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8


def encode(kind: int, flags: int, stream_id: int, length: int, data: bytes = b"") -> bytes:
    return struct.pack("!BBHII", 0, kind, flags, stream_id, length) + data


def move(source: yamux.Yamux, target: yamux.Yamux, now: float = 0.0) -> None:
    """Deliver all queued bytes."""
    while data := source.data_to_send():
        assert len(data) <= yamux.MAX_MESSAGE_BYTES
        source.note_sent(len(data))
        target.receive_data(data, now)


class Pair:
    """Two ends of one connection, with one stream."""

    def __init__(self) -> None:
        self.alice, self.bob = yamux.Yamux(is_initiator=True, now=0.0), yamux.Yamux(is_initiator=False, now=0.0)
        self.near = self.alice.open_stream()
        self.exchange()
        far = self.bob.accept_stream()
        assert far is not None
        self.far = far

    def exchange(self, now: float = 0.0) -> None:
        while self.alice.num_queued or self.bob.num_queued:
            move(self.alice, self.bob, now)
            move(self.bob, self.alice, now)


def test_what_one_end_sends_the_other_reads_and_each_may_finish_first() -> None:
    pair = Pair()
    assert pair.near.send(memoryview(b"question")) == 8
    pair.near.finish()
    pair.exchange()
    assert pair.far.read(5, now=0.0) == b"quest"
    assert pair.far.read(None, now=0.0) == b"ion"
    assert pair.far.has_ended
    assert pair.far.send(memoryview(b"answer")) == 6
    pair.far.finish()
    pair.exchange()
    assert pair.near.read(None, now=0.0) == b"answer"
    assert not pair.alice.is_open(pair.near.stream_id)
    assert not pair.bob.is_open(pair.far.stream_id)
    with pytest.raises(LocalProtocolError):
        pair.near.send(memoryview(b"more"))


def test_what_is_received_says_what_has_changed_and_who_answers_before_it_is_asked_seems_no_nearer() -> None:
    alice, bob = yamux.Yamux(is_initiator=True, now=0.0), yamux.Yamux(is_initiator=False, now=0.0)
    stream = alice.open_stream()
    stream.send(memoryview(b"x"))
    assert bob.receive_data(alice.data_to_send(), 0.0) == [stream.stream_id]
    assert bob.waiting
    alice.ping(now=1.0, number=7)
    assert alice.awaits_pong
    move(alice, bob)
    alice.receive_data(bob.data_to_send(), 3.5)
    assert not alice.awaits_pong
    assert alice.round_trip == 2.5
    alice.go_away()
    move(alice, bob)
    assert bob.has_ended
    alice = yamux.Yamux(is_initiator=True, now=0.0)
    alice.ping(now=1.0, number=0x5EED)
    alice.receive_data(b"".join(encode(PING, ACK, 0, guess) for guess in range(50)), 1.0)
    assert alice.round_trip is None
    alice.receive_data(encode(PING, ACK, 0, 0x5EED), 3.5)
    assert alice.round_trip == 2.5


def test_a_window_grows_while_its_reader_keeps_up_and_never_beyond_its_bound() -> None:
    pair = Pair()
    num_sent = 0
    for _ in range(2_000):
        num_sent += pair.near.send(memoryview(bytes(60_000)))
        if not pair.near.room:
            move(pair.alice, pair.bob)
            pair.far.read(None, now=0.0)
            move(pair.bob, pair.alice)
    unread = 0
    while pair.near.send_window:  # no one reads now
        unread += pair.near.send(memoryview(bytes(60_000)))
        move(pair.alice, pair.bob)
    assert num_sent > yamux.MAX_WINDOW
    assert yamux.INITIAL_WINDOW < unread <= yamux.MAX_WINDOW
    assert pair.far.num_unread <= yamux.MAX_WINDOW


def test_the_queue_is_bounded_for_data_and_empty_before_bulk() -> None:
    pair = Pair()
    sent = list(itertools.takewhile(bool, (pair.near.send(memoryview(bytes(60_000))) for _ in range(100))))
    assert yamux.MAX_QUEUED_DATA <= pair.alice.num_queued < yamux.MAX_QUEUED_DATA + yamux.MAX_MESSAGE_BYTES
    assert sum(sent) < yamux.INITIAL_WINDOW
    pair.near.is_bulk = True
    data = pair.alice.data_to_send()
    pair.alice.note_sent(len(data))
    assert not pair.near.room
    while data := pair.alice.data_to_send():
        pair.alice.note_sent(len(data))
    assert pair.near.room


def test_an_honest_burst_of_streams_costs_the_excess_and_not_the_connection() -> None:
    for number in (200, 1_000):
        alice, bob = yamux.Yamux(is_initiator=True, now=0.0), yamux.Yamux(is_initiator=False, now=0.0)
        streams = [alice.open_stream() for _ in range(number)]
        for stream in streams:
            stream.send(memoryview(b"a request"))
        move(alice, bob)
        move(bob, alice)
        assert not bob.has_ended
        assert sum(not stream.is_reset for stream in streams) == yamux.MAX_WAITING_STREAMS
        accepted = [bob.accept_stream() for _ in range(yamux.MAX_WAITING_STREAMS)]
        assert all(stream is not None and stream.read(None, now=0.0) == b"a request" for stream in accepted)
        again = alice.open_stream()
        move(alice, bob)
        move(bob, alice)
        assert not again.is_reset


def test_an_end_resets_what_is_open_and_keeps_what_was_received() -> None:
    pair = Pair()
    pair.near.send(memoryview(b"last words"))
    move(pair.alice, pair.bob)
    pair.bob.end()
    assert pair.far.is_reset
    assert pair.far.read(None, now=0.0) == b"last words"
    assert pair.bob.num_unread == 0
    assert not pair.bob.data_to_send()
    with pytest.raises(LocalProtocolError):
        pair.bob.open_stream()


def inbound(*stream_ids: int) -> tuple[yamux.Yamux, list[yamux.YamuxStream]]:
    """Return the end that was dialled, and its streams that the other end has opened."""
    conn = yamux.Yamux(is_initiator=False, now=0.0)
    for stream_id in stream_ids:
        conn.receive_data(encode(WINDOW_UPDATE, SYN, stream_id, 0), 0.0)
    sent(conn)
    return conn, list(iter(conn.accept_stream, None))


def sent(conn: yamux.Yamux) -> bytes:
    """Return all that is queued, as written."""
    data = b"".join(iter(conn.data_to_send, b""))
    conn.note_sent(len(data))
    return data


@pytest.mark.parametrize(
    "bad",
    [
        b"\1" + bytes(11),
        encode(7, 0, 0, 0),
        encode(DATA, SYN, 2, 0),
        encode(DATA, SYN, 1, 0),
        encode(DATA, 0, 1, 2**31),
        encode(DATA, 0, 1, yamux.INITIAL_WINDOW + 1, bytes(yamux.INITIAL_WINDOW + 1)),
    ],
)
def test_what_no_honest_peer_sends_ends_the_connection(bad: bytes) -> None:
    conn, _ = inbound(1)
    with pytest.raises(RemoteProtocolError):
        conn.receive_data(bad, 0.0)
    assert conn.has_ended


def test_too_many_streams_are_refused_one_by_one_and_those_that_nobody_takes_up_are_fewer() -> None:
    for most, is_taken_up in ((yamux.MAX_INBOUND_STREAMS, True), (yamux.MAX_WAITING_STREAMS, False)):
        conn, _ = inbound()
        for number in range(most + 1):
            stream_id = 2 * number + 1
            conn.receive_data(encode(WINDOW_UPDATE, SYN, stream_id, 0), 0.0)
            assert sent(conn) == encode(WINDOW_UPDATE, ACK if number < most else RST, stream_id, 0)
            if is_taken_up:
                conn.accept_stream()


def test_the_stream_with_most_unread_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yamux, "MAX_UNREAD_BYTES", 1000)
    conn, (small, large) = inbound(1, 3)
    conn.receive_data(encode(DATA, 0, 1, 400, bytes(400)) + encode(DATA, 0, 3, 601, bytes(601)), 0.0)
    assert sent(conn) == encode(WINDOW_UPDATE, RST, 3, 0)
    assert large.is_reset
    assert len(small.read(None, 0.0)) == 400
    assert conn.num_unread == 0


def test_a_peer_that_pings_and_reads_nothing_is_cut_off() -> None:
    conn, _ = inbound()
    with pytest.raises(RemoteProtocolError, match="reads nothing"):
        for second in itertools.count():  # slowly enough to be no flood
            conn.receive_data(encode(PING, SYN, 0, 1) * 8, float(second))
    assert conn.num_counted_out < yamux.MAX_QUEUED_BYTES + 1_000


def test_a_stream_that_is_abandoned_or_passes_its_limit_refuses_what_still_comes() -> None:
    conn, (abandoned, limited) = inbound(1, 3)
    abandoned.abandon()
    assert sent(conn) == encode(WINDOW_UPDATE, FIN, 1, 0)
    conn.receive_data(encode(DATA, 0, 1, 3, b"abc"), 0.0)
    assert sent(conn) == encode(WINDOW_UPDATE, RST, 1, 0)
    limited.limit(1000)
    conn.receive_data(encode(DATA, 0, 3, 1000, bytes(1000)), 0.0)
    assert len(limited.read(None, 0.0)) == 1000
    conn.receive_data(encode(DATA, 0, 3, 1, b"x"), 0.0)
    assert sent(conn) == encode(WINDOW_UPDATE, RST, 3, 0)
    assert limited.is_reset
    assert not conn.has_ended


@pytest.mark.parametrize(
    "useless",
    [
        encode(PING, SYN, 0, 1),
        encode(PING, ACK, 0, 1),
        encode(DATA, 0, 1, 0),
        encode(WINDOW_UPDATE, 0, 1, 1),
        encode(WINDOW_UPDATE, 0, 99, 1),
        encode(DATA, 0, 99, 1000, bytes(1000)),
    ],
)
def test_who_makes_work_and_brings_nothing_is_cut_off(useless: bytes) -> None:
    conn, _ = inbound(1)
    with pytest.raises(RemoteProtocolError, match="of no use"):
        for _ in range(int(yamux.USELESS_BURST) + 1):
            conn.receive_data(useless, 0.0)
            sent(conn)


def test_what_is_under_way_to_a_stream_that_ends_is_no_offence() -> None:
    conn, (stream,) = inbound(1)
    stream.reset()
    full = encode(DATA, 0, 1, yamux.PIECE_BYTES, bytes(yamux.PIECE_BYTES))
    for _ in range(yamux.MAX_WINDOW // yamux.PIECE_BYTES):
        conn.receive_data(full, 0.0)
        sent(conn)
    assert not conn.has_ended


FRAMES = st.one_of(
    st.binary(max_size=40),
    st.builds(
        lambda kind, flags, stream_id, data: encode(kind, flags, stream_id, len(data), data if kind == 0 else b""),
        st.integers(0, 4),
        st.integers(0, 15),
        st.integers(0, 5),
        st.binary(max_size=30),
    ),
)


@settings(max_examples=300)
@given(st.lists(FRAMES, max_size=30))
def test_no_bytes_whatever_raise_anything_but_a_remote_protocol_error(pieces: list[bytes]) -> None:
    conn = yamux.Yamux(is_initiator=False, now=0.0)
    with suppress(RemoteProtocolError):
        for piece in pieces:
            conn.receive_data(piece, now=0.0)
    accepted = list(iter(conn.accept_stream, None))
    assert conn.num_unread == sum(stream.num_unread for stream in accepted)
    assert len(accepted) <= yamux.MAX_INBOUND_STREAMS


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["open", "send", "read", "finish", "reset", "abandon", "ping", "move", "garbage"]),
            st.booleans(),
            st.integers(0, 7),
            st.binary(max_size=50),
        ),
        max_size=60,
    )
)
def test_any_use_with_any_bytes_between_raises_nothing_else_and_keeps_count(
    steps: list[tuple[str, bool, int, bytes]],
) -> None:
    ends = yamux.Yamux(is_initiator=True, now=0.0), yamux.Yamux(is_initiator=False, now=0.0)
    streams: tuple[list[yamux.YamuxStream], list[yamux.YamuxStream]] = ([], [])
    now = 0.0
    with suppress(RemoteProtocolError):
        for action, side, index, data in steps:
            now += 0.01
            end, other, mine = ends[side], ends[not side], streams[side]
            stream = mine[index % len(mine)] if mine else None
            if action == "garbage":
                end.receive_data(data, now)
            elif action == "move":
                move(end, other, now)
                streams[not side].extend(iter(other.accept_stream, None))
            elif action == "ping":
                end.ping(now, index)
            elif action == "open" and not end.has_ended:
                mine.append(end.open_stream())
            elif stream is not None:
                use(stream, action, data, now)
    for end, mine in zip(ends, streams, strict=True):
        mine.extend(iter(end.accept_stream, None))
        assert end.num_unread == sum(stream.num_unread for stream in mine)


def use(stream: yamux.YamuxStream, action: str, data: bytes, now: float) -> None:
    match action:
        case "send":
            if not (stream.has_finished or stream.is_reset):
                assert stream.send(memoryview(data)) <= len(data)
        case "read":
            assert len(stream.read(len(data), now)) <= len(data)
        case "finish":
            stream.finish()
        case "reset":
            stream.reset()
        case "abandon":
            stream.abandon()
