from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.protocol.errors import LocalProtocolError, RemoteProtocolError
from farandole.protocol.exchange import (
    BULK_FROM,
    CHUNK_BYTES,
    CHUNK_FRAME_BYTES,
    DIGEST_BYTES,
    MAX_CONTROL_BYTES,
    MAX_OUTCOMES,
    TRANSITIONS,
    Aborted,
    Accepted,
    Chunk,
    Commit,
    Committed,
    ContributionReceived,
    Control,
    Event,
    Exchange,
    Offer,
    Outcomes,
    Resolution,
    Resolve,
    Route,
    Step,
    decode_resolution,
    decode_resolve,
    encode_resolve,
    peek_offer,
    resolve_parser,
)

SIZE = 2 * CHUNK_BYTES + 100


class Side:
    """One side of a session, with a contribution to send."""

    def __init__(self, is_initiator: bool, size: int = SIZE) -> None:
        self.contribution = random.Random(is_initiator).randbytes(size)
        self.incoming = bytearray(size)
        self.offer = Offer(
            run_id=b"r" * 32,
            session=b"s" * 16,
            stage=3,
            layout=b"l" * 32,
            codec="int8",
            size=size,
            round=4 + is_initiator,
            tokens=5,
            digest=blake3(self.contribution).digest(),
            seconds_left=30.0,
        )
        self.exchange = Exchange(is_initiator, self.offer, memoryview(self.incoming))

    def chunks(self) -> Iterator[Chunk]:
        for offset in range(0, len(self.contribution), CHUNK_BYTES):
            yield Chunk(offset, memoryview(self.contribution)[offset : offset + CHUNK_BYTES])

    def receive(self, data: bytes, piece: int = 2**20) -> list[Event]:
        events: list[Event] = []
        for start in range(0, len(data), piece):
            self.exchange.receive_data(data[start : start + piece])
            while (event := self.exchange.next_event()) is not None:
                events.append(event)
        return events


@pytest.fixture
def alice() -> Side:
    return Side(is_initiator=True)


@pytest.fixture
def bob() -> Side:
    return Side(is_initiator=False)


def tell(sender: Side, receiver: Side, *messages: Control | Chunk, piece: int = 2**20) -> list[Event]:
    return receiver.receive(b"".join(sender.exchange.send(message) for message in messages), piece)


def share(alice: Side, bob: Side, piece: int = 2**20) -> None:
    """Up to both verdicts."""
    assert tell(alice, bob, alice.offer, piece=piece) == [alice.offer]
    assert tell(bob, alice, bob.offer, piece=piece) == [bob.offer]
    for sender, receiver in ((alice, bob), (bob, alice)):
        assert tell(sender, receiver, *sender.chunks(), piece=piece) == [ContributionReceived(len(sender.contribution))]
        assert receiver.incoming == sender.contribution


@pytest.mark.parametrize("piece", [1, 7, CHUNK_FRAME_BYTES, 2**20])
def test_a_session_from_offer_to_commit_however_the_stream_is_cut(piece: int) -> None:
    size = 300 if piece == 1 else SIZE
    alice, bob = Side(True, size), Side(False, size)
    share(alice, bob, piece)
    assert tell(bob, alice, Accepted(), piece=piece) == [Accepted()]
    assert bob.exchange.is_in_doubt
    assert tell(alice, bob, Commit(), piece=piece) == [Commit()]
    assert not bob.exchange.is_in_doubt
    assert tell(bob, alice, Committed(), piece=piece) == [Committed()]
    assert alice.exchange.ours is alice.exchange.theirs is Step.COMMITTED


def test_the_initiator_alone_may_abort_after_the_responders_verdict(alice: Side, bob: Side) -> None:
    share(alice, bob)
    tell(bob, alice, Accepted())
    assert alice.exchange.can_abort
    assert not bob.exchange.can_abort
    with pytest.raises(LocalProtocolError):
        bob.exchange.send(Aborted("too late"))
    assert tell(alice, bob, Aborted("refused")) == [Aborted("refused")]
    assert not bob.exchange.is_in_doubt


def test_a_full_chunk_fills_one_frame(alice: Side, bob: Side) -> None:
    tell(alice, bob, alice.offer)
    assert len(alice.exchange.send(next(alice.chunks()))) == CHUNK_FRAME_BYTES


CHANNEL = b"c" * 16


@pytest.fixture
def large() -> tuple[Side, Side]:
    """Alice and Bob with contributions that go over a channel; both have offered."""
    alice, bob = Side(True, BULK_FROM), Side(False, BULK_FROM)
    tell(alice, bob, alice.offer)
    tell(bob, alice, bob.offer)
    return alice, bob


def move_whole(sender: Side, receiver: Side) -> None:
    receiver.exchange.incoming[:] = sender.contribution
    sender.exchange.send_whole(sender.offer.digest)
    receiver.exchange.receive_whole(blake3(receiver.incoming).digest())


def test_a_session_whose_contributions_move_over_a_channel(large: tuple[Side, Side]) -> None:
    alice, bob = large
    assert tell(alice, bob, Route(CHANNEL)) == [Route(CHANNEL)]
    assert tell(bob, alice, Route(CHANNEL)) == [Route(CHANNEL)]
    assert alice.exchange.channel == bob.exchange.channel == CHANNEL
    move_whole(alice, bob)
    move_whole(bob, alice)
    assert tell(bob, alice, Accepted()) == [Accepted()]
    assert bob.exchange.is_in_doubt
    assert tell(alice, bob, Commit()) == [Commit()]
    assert tell(bob, alice, Committed()) == [Committed()]
    assert bob.incoming == alice.contribution


@pytest.mark.parametrize("named", [None, CHANNEL])
def test_without_a_channel_at_both_ends_chunks_move(large: tuple[Side, Side], named: bytes | None) -> None:
    alice, bob = large
    tell(alice, bob, Route(named))
    tell(bob, alice, Route(None))
    for sender, receiver in (large, large[::-1]):
        assert tell(sender, receiver, *sender.chunks()) == [ContributionReceived(BULK_FROM)]
        assert receiver.incoming == sender.contribution
        with pytest.raises(LocalProtocolError):
            receiver.exchange.receive_whole(sender.offer.digest)


def test_the_responder_names_no_channel_of_its_own(large: tuple[Side, Side]) -> None:
    alice, bob = large
    tell(alice, bob, Route(CHANNEL))
    with pytest.raises(LocalProtocolError):
        bob.exchange.send(Route(b"x" * 16))
    forged = Side(False, BULK_FROM)
    tell(alice := Side(True, BULK_FROM), forged, alice.offer)
    tell(forged, alice, forged.offer)
    tell(alice, forged, Route(CHANNEL))
    forged.exchange._named = b"x" * 16
    with pytest.raises(RemoteProtocolError, match="not named"):
        tell(forged, alice, Route(b"x" * 16))


def test_nothing_moves_before_both_have_named_the_way(large: tuple[Side, Side]) -> None:
    alice, bob = large
    for side in large:
        with pytest.raises(LocalProtocolError):
            side.exchange.send(next(side.chunks()))
    with pytest.raises(LocalProtocolError):
        bob.exchange.send(Route(None))  # the initiator is first
    tell(alice, bob, Route(CHANNEL))
    for message in (next(alice.chunks()), Route(None), Commit()):
        with pytest.raises(LocalProtocolError):
            alice.exchange.send(message)
    for side in large:
        assert side.exchange.can_abort


def test_small_contributions_need_no_way(alice: Side, bob: Side) -> None:
    tell(alice, bob, alice.offer)
    tell(bob, alice, bob.offer)
    with pytest.raises(LocalProtocolError):
        alice.exchange.send(Route(None))


def test_a_channel_brings_what_was_offered_or_nothing(large: tuple[Side, Side]) -> None:
    alice, bob = large
    tell(alice, bob, Route(CHANNEL))
    tell(bob, alice, Route(CHANNEL))
    with pytest.raises(RemoteProtocolError, match="hash"):
        alice.exchange.receive_whole(bytes(DIGEST_BYTES))
    with pytest.raises(LocalProtocolError, match="changed"):
        alice.exchange.send_whole(bytes(DIGEST_BYTES))
    with pytest.raises(LocalProtocolError, match="before the contribution"):
        bob.exchange.send(Accepted())
    move_whole(alice, bob)
    tell(bob, alice, Accepted())  # it cannot know that Alice has nothing yet
    with pytest.raises(LocalProtocolError, match="before the contribution"):
        alice.exchange.send(Commit())
    with pytest.raises(RemoteProtocolError):
        tell(Side(True), bob, Aborted("x"))
        bob.receive(alice.exchange.send(Aborted("x")) * 2)


@pytest.mark.parametrize("message", [Accepted(), Commit(), Committed()])
def test_no_verdict_before_everything_is_there(alice: Side, bob: Side, message: Control) -> None:
    tell(alice, bob, alice.offer)
    tell(bob, alice, bob.offer)
    for side in (alice, bob):
        with pytest.raises(LocalProtocolError):
            side.exchange.send(message)
    forged = Side(True).exchange
    payload = msgspec.msgpack.encode(message)
    data = (1 + len(payload)).to_bytes(4, "big") + b"\0" + payload
    for side in (alice, bob):
        with pytest.raises(RemoteProtocolError):
            side.receive(data)
    assert forged.ours is Step.OFFERING


def test_a_commit_without_our_verdict_is_a_lie(alice: Side, bob: Side) -> None:
    share(alice, bob)
    with pytest.raises(LocalProtocolError):
        alice.exchange.send(Commit())
    payload = msgspec.msgpack.encode(Commit())
    with pytest.raises(RemoteProtocolError):
        bob.receive((1 + len(payload)).to_bytes(4, "big") + b"\0" + payload)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 1),
        ("run_id", b"x" * 32),
        ("session", b"x" * 16),
        ("stage", 4),
        ("layout", b"x" * 32),
        ("codec", "fp32"),
        ("size", SIZE - 1),
        ("seconds_left", math.nan),
    ],
)
def test_an_offer_that_does_not_fit_is_refused(alice: Side, bob: Side, field: str, value: object) -> None:
    lie = msgspec.structs.replace(alice.offer, **{field: value})
    with pytest.raises(RemoteProtocolError):
        tell(alice, bob, lie)
    assert bob.exchange.partner_offer is None


def test_a_wrong_hash_is_found_at_the_last_byte(alice: Side, bob: Side) -> None:
    tell(alice, bob, msgspec.structs.replace(alice.offer, digest=bytes(DIGEST_BYTES)))
    tell(bob, alice, bob.offer)
    with pytest.raises(RemoteProtocolError, match="hash"):
        tell(alice, bob, *alice.chunks())


def _chunk(offset: int, size: int) -> bytes:
    return (9 + size).to_bytes(4, "big") + b"\1" + offset.to_bytes(8, "big")


@pytest.mark.parametrize(
    "header",
    [
        _chunk(0, CHUNK_BYTES + 1),
        _chunk(0, 2**32 - 10),
        _chunk(1, 10),
        _chunk(2**63, 10),
        _chunk(0, 0),
        (0).to_bytes(4, "big") + b"\1" + bytes(8),
        (2 + MAX_CONTROL_BYTES).to_bytes(4, "big") + b"\0",
        (2**32 - 1).to_bytes(4, "big") + b"\0",
        (0).to_bytes(4, "big") + b"\0",
        (5).to_bytes(4, "big") + b"\2",
    ],
)
def test_a_lying_header_is_refused_before_anything_follows_it(alice: Side, bob: Side, header: bytes) -> None:
    tell(alice, bob, alice.offer)
    with pytest.raises(RemoteProtocolError):
        bob.receive(header, piece=1)


def test_more_than_was_offered_is_refused(alice: Side, bob: Side) -> None:
    share(alice, bob)
    with pytest.raises(RemoteProtocolError):
        bob.receive(_chunk(SIZE, 1))


def test_bytes_behind_the_end_are_refused(alice: Side, bob: Side) -> None:
    share(alice, bob)
    tell(bob, alice, Accepted())
    with pytest.raises(RemoteProtocolError, match="after the end"):
        bob.receive(alice.exchange.send(Commit()) + b"x")


def test_the_responder_answers_an_offer_and_does_not_make_the_first(alice: Side, bob: Side) -> None:
    with pytest.raises(LocalProtocolError):
        bob.exchange.send(bob.offer)


def test_memory_must_be_writable_and_large_enough(alice: Side) -> None:
    with pytest.raises(LocalProtocolError):
        Exchange(True, alice.offer, memoryview(bytes(SIZE)))
    with pytest.raises(LocalProtocolError):
        Exchange(True, alice.offer, memoryview(bytearray(SIZE - 1)))


def test_every_state_of_the_table_can_be_reached_and_every_end_is_an_end() -> None:
    for table in TRANSITIONS.values():
        reached, fresh = {Step.OFFERING}, {Step.OFFERING}
        while fresh:
            fresh = {after for step in fresh for after in table[step].values()} - reached
            reached |= fresh
        assert {Step.COMMITTED, Step.ABORTED} <= reached
        assert not table[Step.COMMITTED]
        assert not table[Step.ABORTED]


def test_the_offer_can_be_read_before_the_session_is_known(alice: Side) -> None:
    data = alice.exchange.send(alice.offer)
    assert all(peek_offer(data[:end]) is None for end in range(len(data)))
    assert peek_offer(data + b"more") == alice.offer


def test_outcomes_the_first_decision_holds() -> None:
    outcomes = Outcomes()
    outcomes.begin(b"s", b"bob")
    assert outcomes.answer(b"s", b"bob") == "undecided"
    assert outcomes.decide(b"s", committed=True)
    assert outcomes.decide(b"s", committed=False)
    assert outcomes.answer(b"s", b"bob") == "committed"
    with pytest.raises(RemoteProtocolError):
        outcomes.answer(b"s", b"mallory")


def test_outcomes_what_is_unknown_was_never_committed_and_memory_is_bounded() -> None:
    outcomes = Outcomes()
    assert outcomes.answer(b"s", b"bob") == "aborted"
    assert not outcomes.decide(b"s", committed=True)
    for index in range(MAX_OUTCOMES + 1):
        outcomes.begin(index.to_bytes(16, "big"), b"bob")
        outcomes.decide(index.to_bytes(16, "big"), committed=True)
    assert outcomes.answer(bytes(16), b"bob") == "aborted"
    assert outcomes.answer(MAX_OUTCOMES.to_bytes(16, "big"), b"bob") == "committed"


def test_questions_and_answers_survive_the_wire() -> None:
    parser = resolve_parser()
    parser.receive_data(encode_resolve(Resolve(b"s" * 16)) + encode_resolve(Resolution("undecided")))
    question, answer = parser.next_frame(), parser.next_frame()
    assert question is not None
    assert answer is not None
    assert decode_resolve(question) == Resolve(b"s" * 16)
    assert decode_resolution(answer) == Resolution("undecided")


def _transcript() -> bytes:
    """All that an initiator sends in one good session, small."""
    alice, bob = Side(True, 200), Side(False, 200)
    sent = alice.exchange.send(alice.offer)
    bob.receive(sent)
    alice.receive(bob.exchange.send(bob.offer))
    for chunk in alice.chunks():
        sent += alice.exchange.send(chunk)
    alice.receive(b"".join(bob.exchange.send(chunk) for chunk in bob.chunks()))
    bob.receive(sent[len(sent) - 213 :])
    alice.receive(bob.exchange.send(Accepted()))
    return sent + alice.exchange.send(Commit())


TRANSCRIPT = _transcript()


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.integers(0, len(TRANSCRIPT) - 1), st.integers(0, 255)), max_size=4),
    st.integers(0, len(TRANSCRIPT)),
    st.binary(max_size=64),
    st.integers(1, 500),
)
def test_mutated_sessions_raise_remote_protocol_errors_and_never_commit_rubbish(
    flips: list[tuple[int, int]], cut: int, extra: bytes, piece: int
) -> None:
    data = bytearray(TRANSCRIPT)
    for position, value in flips:
        data[position] = value
    data[cut:cut] = extra
    bob = Side(False, 200)
    try:
        for start in range(0, len(data), piece):
            for event in bob.receive(bytes(data[start : start + piece])):
                if isinstance(event, Offer):
                    bob.exchange.send(bob.offer)
                    for chunk in bob.chunks():
                        bob.exchange.send(chunk)
                if isinstance(event, ContributionReceived):
                    offer = bob.exchange.partner_offer
                    assert offer is not None
                    assert blake3(bob.incoming).digest() == offer.digest
                    bob.exchange.send(Accepted())
    except RemoteProtocolError:
        pass
    assert len(bob.exchange._head) <= MAX_CONTROL_BYTES + 5


@settings(max_examples=300)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_raise_only_remote_protocol_errors(data: bytes) -> None:
    for decode in (peek_offer, decode_resolve, decode_resolution, Side(False, 200).receive, Side(True, 200).receive):
        with contextlib.suppress(RemoteProtocolError):
            decode(data)
