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
from farandole.protocol.exchange import BULK_FROM, MAX_ROUTES, ContributionReceived, Event, Exchange
from farandole.protocol.exchange_messages import (
    CHUNK_BYTES,
    CHUNK_FRAME_BYTES,
    DIGEST_BYTES,
    MAX_CONTROL_BYTES,
    Aborted,
    Accepted,
    Chunk,
    Commit,
    Committed,
    Control,
    Offer,
    Received,
    Reroute,
    Route,
    Sealed,
    peek_offer,
)
from farandole.protocol.exchange_steps import TRANSITIONS, Step
from farandole.protocol.outcomes import (
    MAX_OUTCOMES,
    Outcomes,
    Resolution,
    Resolve,
    decode_resolution,
    decode_resolve,
    encode_resolve,
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
            seconds_left=30.0,
        )
        self.sealed = Sealed(blake3(self.contribution).digest())
        self.exchange = Exchange(is_initiator, self.offer, memoryview(self.incoming))

    def chunks(self) -> Iterator[Chunk]:
        """Those that have not moved yet."""
        for offset in range(self.exchange.num_sent, len(self.contribution), CHUNK_BYTES):
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


def share_offers(alice: Side, bob: Side, piece: int = 2**20) -> None:
    assert tell(alice, bob, alice.offer, piece=piece) == [alice.offer]
    assert tell(bob, alice, bob.offer, piece=piece) == [bob.offer]


def share(alice: Side, bob: Side, piece: int = 2**20) -> None:
    """Up to both verdicts."""
    share_offers(alice, bob, piece)
    for sender, receiver in ((alice, bob), (bob, alice)):
        *chunks, last = sender.chunks()
        assert tell(sender, receiver, *chunks, sender.sealed, last, piece=piece) == [
            sender.sealed,
            ContributionReceived(len(sender.contribution)),
        ]
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
    share_offers(alice, bob)
    return alice, bob


def open_way(alice: Side, bob: Side, channel: bytes | None = CHANNEL) -> None:
    """The initiator's Route and its answer."""
    for side, other in ((alice, bob), (bob, alice)):
        route = Route(channel, side.exchange.num_received)
        assert tell(side, other, route) == [route]
    assert alice.exchange.channel == bob.exchange.channel == channel


def move_over(sender: Side, receiver: Side, end: int = BULK_FROM) -> None:
    """Over the channel, up to an offset."""
    incoming = receiver.exchange.incoming
    incoming.write(memoryview(sender.contribution)[incoming.position : end])


def take_whole(receiver: Side, sender: Side) -> list[Event]:
    if sender.exchange.digest is None:
        tell(sender, receiver, sender.sealed)
    receiver.exchange.check_whole()
    return tell(receiver, sender, Received())


def assert_can_commit(alice: Side, bob: Side) -> None:
    assert tell(bob, alice, Accepted()) == [Accepted()]
    assert bob.exchange.is_in_doubt
    assert tell(alice, bob, Commit()) == [Commit()]
    assert tell(bob, alice, Committed()) == [Committed()]
    assert alice.incoming == bob.contribution
    assert bob.incoming == alice.contribution


def test_a_session_whose_contributions_move_over_a_channel(large: tuple[Side, Side]) -> None:
    alice, bob = large
    open_way(alice, bob)
    for sender, receiver in ((alice, bob), (bob, alice)):
        move_over(sender, receiver)
        assert take_whole(receiver, sender) == [Received()]
    assert_can_commit(alice, bob)


@pytest.mark.parametrize("named", [None, CHANNEL])
def test_without_a_channel_at_both_ends_chunks_move(large: tuple[Side, Side], named: bytes | None) -> None:
    alice, bob = large
    tell(alice, bob, Route(named, 0))
    tell(bob, alice, Route(None, 0))
    for sender, receiver in (large, large[::-1]):
        assert tell(sender, receiver, sender.sealed, *sender.chunks())[1:] == [ContributionReceived(BULK_FROM)]
        assert receiver.incoming == sender.contribution
        with pytest.raises(LocalProtocolError):
            receiver.exchange.send(Received())
    assert_can_commit(alice, bob)


@pytest.mark.parametrize("channel", [None, CHANNEL[::-1]])
@pytest.mark.parametrize("by_bob", [0, 1, BULK_FROM - 1, BULK_FROM])
@pytest.mark.parametrize("by_alice", [0, 1, BULK_FROM - 1, BULK_FROM])
def test_a_broken_channel_is_replaced_and_nothing_moves_twice(
    large: tuple[Side, Side], by_alice: int, by_bob: int, channel: bytes | None
) -> None:
    alice, bob = large
    open_way(alice, bob)
    for sender, receiver, end in ((alice, bob, by_alice), (bob, alice, by_bob)):
        move_over(sender, receiver, end)
        if end == BULK_FROM:
            take_whole(receiver, sender)
    if by_alice == by_bob == BULK_FROM:
        for side in large:
            with pytest.raises(LocalProtocolError):
                side.exchange.send(Route(channel, BULK_FROM))
        return
    if by_bob == BULK_FROM:  # Alice has no need of another way
        with pytest.raises(LocalProtocolError, match="nobody needs"):
            alice.exchange.send(Route(channel, BULK_FROM))
        assert tell(bob, alice, Reroute()) == [Reroute()]
    open_way(alice, bob, channel)
    assert (alice.exchange.num_sent, bob.exchange.num_sent) == (by_alice, by_bob)
    for sender, receiver in ((alice, bob), (bob, alice)):
        if sender.exchange.num_sent == BULK_FROM:
            continue
        if channel is None:
            tell(sender, receiver, sender.sealed)
            assert tell(sender, receiver, *sender.chunks()) == [ContributionReceived(BULK_FROM)]
        else:
            move_over(sender, receiver)
            take_whole(receiver, sender)
    assert_can_commit(alice, bob)


def test_a_word_of_the_responder_may_cross_the_initiators_route(large: tuple[Side, Side]) -> None:
    for crossing in (Reroute(), Received()):
        alice, bob = Side(True, BULK_FROM), Side(False, BULK_FROM)
        share_offers(alice, bob)
        open_way(alice, bob)
        for sender, receiver in ((alice, bob), (bob, alice)):
            tell(sender, receiver, sender.sealed)
        move_over(alice, bob, BULK_FROM if crossing == Received() else 7)
        if crossing == Received():
            bob.exchange.check_whole()
        said = bob.exchange.send(crossing)
        route = alice.exchange.send(Route(None, 0))
        assert alice.receive(said) == [crossing]
        bob.receive(route)
        tell(bob, alice, Route(None, bob.exchange.num_received))
        for sender, receiver in ((alice, bob), (bob, alice)):
            tell(sender, receiver, *sender.chunks())
        assert_can_commit(alice, bob)


@pytest.mark.parametrize("received", [-1, 1, 2**63, BULK_FROM, BULK_FROM + 1])
def test_an_offset_that_cannot_be_is_refused(large: tuple[Side, Side], received: int) -> None:
    alice, bob = large
    open_way(alice, bob)
    with pytest.raises(LocalProtocolError):
        alice.exchange.send(Route(None, received))
    payload = msgspec.msgpack.encode([6, None, received])
    forged = (1 + len(payload)).to_bytes(4, "big") + b"\0" + payload
    if received == 1:  # possible, if not true: it is Alice who then has no whole contribution
        bob.receive(forged)
        return
    with pytest.raises(RemoteProtocolError):
        bob.receive(forged)


def test_a_session_has_so_many_routes(large: tuple[Side, Side]) -> None:
    alice, bob = large
    for _ in range(MAX_ROUTES):
        open_way(alice, bob)
    with pytest.raises(LocalProtocolError, match="beyond"):
        alice.exchange.send(Route(CHANNEL, 0))
    forged = Side(True, BULK_FROM)
    forged.exchange.ours = forged.exchange.theirs = Step.MOVING
    with pytest.raises(RemoteProtocolError, match="beyond"):
        tell(forged, bob, Route(CHANNEL, 0))


@pytest.mark.parametrize("messages", [[Reroute(), Reroute()], [Reroute(), Received()], [Received(), Received()]])
def test_what_contradicts_itself_is_refused(large: tuple[Side, Side], messages: list[Control]) -> None:
    alice, bob = large
    open_way(alice, bob)
    move_over(alice, bob)
    tell(alice, bob, alice.sealed)
    bob.exchange.check_whole()
    first, second = messages
    tell(bob, alice, first)
    with pytest.raises(LocalProtocolError):
        bob.exchange.send(second)
    payload = msgspec.msgpack.encode(second)
    with pytest.raises(RemoteProtocolError):
        alice.receive((1 + len(payload)).to_bytes(4, "big") + b"\0" + payload)


def test_on_the_stream_there_is_no_other_way(large: tuple[Side, Side]) -> None:
    alice, bob = large
    open_way(alice, bob, None)
    for message in (Route(CHANNEL, 0), Received()):
        with pytest.raises(LocalProtocolError):
            alice.exchange.send(message)
    with pytest.raises(LocalProtocolError):
        bob.exchange.send(Reroute())


def test_the_initiator_asks_by_its_route_alone(large: tuple[Side, Side]) -> None:
    alice, bob = large
    open_way(alice, bob)
    with pytest.raises(LocalProtocolError):
        alice.exchange.send(Reroute())
    with pytest.raises(LocalProtocolError):
        bob.exchange.send(Route(None, 0))


def test_the_responder_names_no_channel_of_its_own(large: tuple[Side, Side]) -> None:
    alice, bob = large
    tell(alice, bob, Route(CHANNEL, 0))
    with pytest.raises(LocalProtocolError):
        bob.exchange.send(Route(b"x" * 16, 0))
    alice, forged = Side(True, BULK_FROM), Side(False, BULK_FROM)
    share_offers(alice, forged)
    tell(alice, forged, Route(CHANNEL, 0))
    forged.exchange._named = b"x" * 16
    with pytest.raises(RemoteProtocolError, match="not named"):
        tell(forged, alice, Route(b"x" * 16, 0))


def test_nothing_moves_before_both_have_named_the_way(large: tuple[Side, Side]) -> None:
    alice, bob = large
    for side in large:
        with pytest.raises(LocalProtocolError):
            side.exchange.send(next(side.chunks()))
    with pytest.raises(LocalProtocolError):
        bob.exchange.send(Route(None, 0))  # the initiator is first
    tell(alice, bob, Route(CHANNEL, 0))
    for message in (next(alice.chunks()), Route(None, 0), Received(), Commit()):
        with pytest.raises(LocalProtocolError):
            alice.exchange.send(message)
    for side in large:
        assert side.exchange.can_abort


def test_small_contributions_need_no_way(alice: Side, bob: Side) -> None:
    share_offers(alice, bob)
    with pytest.raises(LocalProtocolError):
        alice.exchange.send(Route(None, 0))


def test_a_channel_brings_what_was_encoded_or_nothing(large: tuple[Side, Side]) -> None:
    alice, bob = large
    open_way(alice, bob)
    with pytest.raises(LocalProtocolError, match="not here yet"):
        alice.exchange.check_whole()
    move_over(alice, bob)
    with pytest.raises(RemoteProtocolError, match="no hash"):
        bob.exchange.check_whole()
    for sender, receiver in ((alice, bob), (bob, alice)):
        tell(sender, receiver, sender.sealed)
    bob.exchange.check_whole()
    for message in (Received(), Commit()):
        with pytest.raises(LocalProtocolError, match="before the contribution"):
            alice.exchange.send(message)
    tell(bob, alice, Received())
    with pytest.raises(LocalProtocolError):
        bob.exchange.send(Accepted())  # Alice has nothing yet, and a verdict is the last word
    alice.exchange.incoming.write(memoryview(bytes(BULK_FROM)))
    with pytest.raises(RemoteProtocolError, match="hash"):
        alice.exchange.check_whole()
    with pytest.raises(LocalProtocolError, match="before the contribution"):
        alice.exchange.send(Received())


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
    share_offers(alice, bob)
    tell(alice, bob, Sealed(bytes(DIGEST_BYTES)))
    *chunks, last = alice.chunks()
    assert not tell(alice, bob, *chunks)
    with pytest.raises(RemoteProtocolError, match="hash"):
        tell(alice, bob, last)
    assert not bob.exchange.is_whole


def test_the_hash_comes_once_and_before_the_last_byte(alice: Side, bob: Side) -> None:
    with pytest.raises(LocalProtocolError):
        alice.exchange.send(alice.sealed)  # of what?
    share_offers(alice, bob)
    *chunks, last = alice.chunks()
    tell(alice, bob, *chunks)
    with pytest.raises(LocalProtocolError, match="before the hash"):
        alice.exchange.send(last)
    forged = bytes(alice.exchange.send(alice.sealed))
    with pytest.raises(LocalProtocolError, match="second"):
        alice.exchange.send(alice.sealed)
    hasty = alice.exchange.send(last)
    with pytest.raises(RemoteProtocolError, match="no hash"):
        bob.receive(hasty)
    twice = Side(is_initiator=False)
    tell(Side(is_initiator=True), twice, alice.offer)
    twice.receive(forged)
    with pytest.raises(RemoteProtocolError, match="second"):
        twice.receive(forged)


@pytest.mark.parametrize("channel", [None, CHANNEL])
@pytest.mark.parametrize("at", ["the offers", "Alice's route", "both routes", "half of it", "another route"])
def test_the_hash_may_be_said_at_any_time_after_the_offers(
    large: tuple[Side, Side], at: str, channel: bytes | None
) -> None:
    alice, bob = large
    for step in ("the offers", "Alice's route", "both routes", "half of it", "another route"):
        match step:
            case "Alice's route":
                tell(alice, bob, Route(CHANNEL, 0))
            case "both routes":
                tell(bob, alice, Route(CHANNEL, 0))
            case "half of it":
                move_over(alice, bob, BULK_FROM // 2)
                move_over(bob, alice, BULK_FROM // 2)
            case "another route":
                open_way(alice, bob, channel)
        if step == at:
            for sender, receiver in (large, large[::-1]):
                assert tell(sender, receiver, sender.sealed) == [sender.sealed]
    for sender, receiver in (large, large[::-1]):
        if channel is None:
            tell(sender, receiver, *sender.chunks())
        else:
            move_over(sender, receiver)
            take_whole(receiver, sender)
    assert_can_commit(alice, bob)


def test_nobody_has_received_what_is_not_encoded(large: tuple[Side, Side]) -> None:
    alice, bob = large
    open_way(alice, bob)
    move_over(alice, bob)
    bob.exchange.partner_digest = alice.sealed.digest  # as if it had been said
    bob.exchange.check_whole()
    lie = bob.exchange.send(Received())
    with pytest.raises(RemoteProtocolError, match="before"):
        alice.receive(lie)


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
    offer = alice.exchange.send(alice.offer)
    bob.receive(offer)
    alice.receive(bob.exchange.send(bob.offer))
    contribution = alice.exchange.send(alice.sealed) + b"".join(map(alice.exchange.send, alice.chunks()))
    alice.receive(bob.exchange.send(bob.sealed) + b"".join(map(bob.exchange.send, bob.chunks())))
    bob.receive(contribution)
    alice.receive(bob.exchange.send(Accepted()))
    return offer + contribution + alice.exchange.send(Commit())


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
                    bob.exchange.send(bob.sealed)
                    for chunk in bob.chunks():
                        bob.exchange.send(chunk)
                if isinstance(event, ContributionReceived):
                    assert blake3(bob.incoming).digest() == bob.exchange.partner_digest
                    bob.exchange.send(Accepted())
    except RemoteProtocolError:
        pass
    assert len(bob.exchange._head) <= MAX_CONTROL_BYTES + 5


MOVES = [
    "alice moves",
    "bob moves",
    "alice seals",
    "bob seals",
    "route",
    "route to the stream",
    "answer",
    "decline",
    "reroute",
    "chunks",
]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, BULK_FROM)), max_size=25))
def test_however_ways_break_both_agree_and_nothing_counts_but_the_whole(moves: list[tuple[str, int]]) -> None:
    """Both do what they may, in any order; what may not be sent is refused where it would be sent."""
    alice, bob = Side(True, BULK_FROM), Side(False, BULK_FROM)
    share_offers(alice, bob)
    for move, number in moves:
        asker, answerer = alice.exchange, bob.exchange
        with contextlib.suppress(LocalProtocolError):
            match move:
                case "alice moves" | "bob moves":
                    sender, receiver = (alice, bob) if move == "alice moves" else (bob, alice)
                    exchange = receiver.exchange
                    if exchange.channel is not None and exchange.theirs is Step.MOVING and not exchange.is_whole:
                        # Nobody sends the last byte before the hash.
                        move_over(sender, receiver, number if sender.exchange.digest else min(number, BULK_FROM - 1))
                        exchange.check_whole()
                        tell(receiver, sender, Received())
                case "alice seals" | "bob seals":
                    sender, receiver = (alice, bob) if move == "alice seals" else (bob, alice)
                    tell(sender, receiver, sender.sealed)
                case "route":
                    tell(alice, bob, Route(CHANNEL, asker.num_received))
                case "route to the stream":
                    tell(alice, bob, Route(None, asker.num_received))
                case "answer":
                    tell(bob, alice, Route(answerer._named, answerer.num_received))
                case "decline":
                    tell(bob, alice, Route(None, answerer.num_received))
                case "reroute":
                    tell(bob, alice, Reroute())
                case "chunks":
                    for sender, receiver in ((alice, bob), (bob, alice)):
                        for chunk in sender.chunks():
                            tell(sender, receiver, chunk)
        assert (asker.channel, asker.num_routes) == (answerer.channel, answerer.num_routes)
        assert asker.num_routes <= MAX_ROUTES
        assert (asker.ours, asker.theirs) == (answerer.theirs, answerer.ours)
        for ours, theirs in ((alice, bob), (bob, alice)):
            assert ours.exchange.digest == theirs.exchange.partner_digest
            assert 0 <= ours.exchange.num_sent <= BULK_FROM
            if ours.exchange.is_whole:
                assert ours.incoming == theirs.contribution


@settings(max_examples=300)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_raise_only_remote_protocol_errors(data: bytes) -> None:
    for decode in (peek_offer, decode_resolve, decode_resolution, Side(False, 200).receive, Side(True, 200).receive):
        with contextlib.suppress(RemoteProtocolError):
            decode(data)
