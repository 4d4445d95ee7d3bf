"""An exchange whose contributions move over its stream."""

from __future__ import annotations

import math

import msgspec
import pytest

from farandole.protocol.exchange import exchange, pipe
from farandole.protocol.wire.errors import LocalProtocolError, RemoteProtocolError
from farandole.protocol.wire.framing import LENGTH_BYTES

from .sides import (
    CHANNEL,
    HERE,
    SIZE,
    Side,
    assert_can_commit,
    incoming_of,
    lie,
    move_over,
    open_way,
    refuse,
    share,
    share_offers,
    tell,
)


@pytest.fixture
def alice() -> Side:
    return Side(is_initiator=True)


@pytest.fixture
def bob() -> Side:
    return Side(is_initiator=False)


@pytest.fixture
def large() -> tuple[Side, Side]:
    """Return Alice and Bob with contributions large enough for a channel; both have offered."""
    alice, bob = Side(True, pipe.BULK_FROM), Side(False, pipe.BULK_FROM)
    share_offers(alice, bob)
    return alice, bob


@pytest.mark.parametrize("piece", [1, 7, pipe.CHUNK_FRAME_BYTES, 2**20])
def test_a_session_from_offer_to_commit_however_the_stream_is_cut(piece: int) -> None:
    size = 300 if piece == 1 else SIZE
    alice, bob = Side(True, size), Side(False, size)
    share(alice, bob, piece)
    assert tell(bob, alice, exchange.Accepted(), piece=piece) == [exchange.Accepted()]
    assert bob.exchange.is_in_doubt
    assert tell(alice, bob, exchange.Commit(), piece=piece) == [exchange.Commit()]
    assert not bob.exchange.is_in_doubt
    assert tell(bob, alice, exchange.Committed(), piece=piece) == [exchange.Committed()]
    assert alice.exchange.ours is alice.exchange.theirs is exchange.Step.COMMITTED


def test_the_initiator_alone_may_abort_after_the_responders_verdict(alice: Side, bob: Side) -> None:
    share(alice, bob)
    tell(bob, alice, exchange.Accepted())
    assert alice.exchange.can_abort
    assert not bob.exchange.can_abort
    with pytest.raises(LocalProtocolError):
        bob.exchange.send(exchange.Aborted("too late"))
    assert tell(alice, bob, exchange.Aborted("refused")) == [exchange.Aborted("refused")]
    assert not bob.exchange.is_in_doubt


@pytest.mark.parametrize("reason", ["\x1b]0;all is well\x07", "two\nlines", "\u009b2J", "\u202etxet"])
def test_a_reason_does_nothing_to_the_terminal_that_shows_it(alice: Side, bob: Side, reason: str) -> None:
    share_offers(alice, bob)
    with pytest.raises(RemoteProtocolError):
        tell(alice, bob, exchange.Aborted(reason))


def test_a_reason_of_ones_own_may_be_said(alice: Side, bob: Side) -> None:
    share_offers(alice, bob)
    said = exchange.Aborted(exchange.reason_of("out of\nm\u00e9moire " * 100))
    assert said.reason.startswith("out of?m?moire out")
    assert tell(alice, bob, said) == [said]


def test_the_offer_can_be_read_before_the_session_is_known(alice: Side) -> None:
    first = alice.exchange.send(alice.offer)[LENGTH_BYTES:]
    assert exchange.decode_first(first) == alice.offer
    for other in (b"", b"\1" + first[1:], b"\0" + msgspec.msgpack.encode(exchange.Commit())):
        with pytest.raises(RemoteProtocolError):
            exchange.decode_first(other)


# A received contribution counts only with its sender's hash, which comes once and in time.


def test_a_wrong_hash_is_found_at_the_last_byte(alice: Side, bob: Side) -> None:
    share_offers(alice, bob)
    tell(alice, bob, pipe.Sealed(bytes(pipe.DIGEST_BYTES)))
    *chunks, last = alice.chunks()
    assert not tell(alice, bob, *chunks)
    with pytest.raises(RemoteProtocolError, match="hash"):
        tell(alice, bob, last)
    assert not bob.exchange.is_whole


def test_the_hash_comes_once_and_before_the_last_byte(alice: Side, bob: Side) -> None:
    with pytest.raises(LocalProtocolError):
        alice.send(alice.sealed)  # nothing is offered yet
    share_offers(alice, bob)
    *chunks, last = alice.chunks()
    tell(alice, bob, *chunks)
    with pytest.raises(LocalProtocolError, match="before the hash"):
        alice.send(last)
    forged = bytes(alice.send(alice.sealed))
    with pytest.raises(LocalProtocolError, match="second"):
        alice.send(alice.sealed)
    hasty = alice.send(last)
    with pytest.raises(RemoteProtocolError, match="no hash"):
        bob.receive(hasty)
    twice = Side(is_initiator=False)
    share_offers(Side(is_initiator=True), twice)
    twice.receive(forged)
    with pytest.raises(RemoteProtocolError, match="second"):
        twice.receive(forged)


def test_nobody_has_received_what_is_not_encoded(large: tuple[Side, Side]) -> None:
    alice, bob = large
    open_way(alice, bob)
    move_over(alice, bob)
    bob.exchange.pipe.incoming.open[0].sealed = alice.sealed.digest  # as if it had been sent
    bob.exchange.pipe.check_whole()
    lie = bob.send(pipe.Received())
    with pytest.raises(RemoteProtocolError, match="before"):
        alice.receive(lie)


# Messages that an honest partner does not send are refused.


@pytest.mark.parametrize("message", [exchange.Accepted(), exchange.Commit(), exchange.Committed()])
def test_no_verdict_before_everything_is_there(alice: Side, bob: Side, message: exchange.Control) -> None:
    share_offers(alice, bob)
    for side in (alice, bob):
        refuse(side, side, message)


def test_a_commit_without_our_verdict_is_a_lie(alice: Side, bob: Side) -> None:
    share(alice, bob)
    refuse(alice, bob, exchange.Commit())


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
        ("size", 2**44),
        ("seconds_left", math.nan),
    ],
)
def test_an_offer_that_does_not_fit_is_refused(alice: Side, bob: Side, field: str, value: object) -> None:
    lie = msgspec.structs.replace(alice.offer, **{field: value})
    with pytest.raises(RemoteProtocolError):
        tell(alice, bob, lie)
    assert bob.exchange.partner_offer is None


def _chunk(offset: int, size: int) -> bytes:
    return (9 + size).to_bytes(4, "big") + b"\1" + offset.to_bytes(8, "big")


@pytest.mark.parametrize(
    "header",
    [
        _chunk(0, pipe.CHUNK_BYTES + 1),
        _chunk(0, 2**32 - 10),
        _chunk(1, 10),
        _chunk(2**63, 10),
        _chunk(0, 0),
        (0).to_bytes(4, "big") + b"\1" + bytes(8),
        (2 + exchange.MAX_CONTROL_BYTES).to_bytes(4, "big") + b"\0",
        (2**32 - 1).to_bytes(4, "big") + b"\0",
        (0).to_bytes(4, "big") + b"\0",
        (5).to_bytes(4, "big") + b"\3",
    ],
)
def test_a_lying_header_is_refused_before_anything_follows_it(alice: Side, bob: Side, header: bytes) -> None:
    share_offers(alice, bob)
    with pytest.raises(RemoteProtocolError):
        bob.receive(header, piece=1)


def test_more_than_was_offered_and_bytes_behind_the_end_are_refused(alice: Side, bob: Side) -> None:
    share(alice, bob)
    with pytest.raises(RemoteProtocolError):
        bob.receive(_chunk(SIZE, 1))
    alice, bob = Side(True), Side(False)
    share(alice, bob)
    tell(bob, alice, exchange.Accepted())
    with pytest.raises(RemoteProtocolError, match="after the end"):
        bob.receive(alice.exchange.send(exchange.Commit()) + b"x")


def test_the_first_decision_holds_and_what_is_unknown_was_never_committed_within_a_bounded_memory() -> None:
    outcomes = exchange.Outcomes()
    outcomes.begin(b"s", b"bob")
    assert outcomes.answer(b"s", b"bob") == "undecided"
    assert outcomes.decide(b"s", committed=True)
    assert outcomes.decide(b"s", committed=False)
    assert outcomes.answer(b"s", b"bob") == "committed"
    with pytest.raises(RemoteProtocolError):
        outcomes.answer(b"s", b"mallory")
    outcomes = exchange.Outcomes()
    assert outcomes.answer(b"s", b"bob") == "aborted"
    assert not outcomes.decide(b"s", committed=True)
    for index in range(exchange.MAX_OUTCOMES + 1):
        outcomes.begin(index.to_bytes(16, "big"), b"bob")
        outcomes.decide(index.to_bytes(16, "big"), committed=True)
    assert outcomes.answer(bytes(16), b"bob") == "aborted"
    assert outcomes.answer(exchange.MAX_OUTCOMES.to_bytes(16, "big"), b"bob") == "committed"


# Contributions that move over channels, which may break


@pytest.mark.parametrize("named", [None, CHANNEL])
def test_without_a_channel_at_both_ends_chunks_move(large: tuple[Side, Side], named: bytes | None) -> None:
    alice, bob = large
    tell(alice, bob, pipe.Route(named, 0))
    tell(bob, alice, pipe.Route(None, 0))
    for sender, receiver in (large, large[::-1]):
        assert tell(sender, receiver, sender.sealed, *sender.chunks())[1:] == [HERE]
        assert receiver.incoming == sender.contribution
        with pytest.raises(LocalProtocolError):
            receiver.send(pipe.Received())
    assert_can_commit(alice, bob)


def test_a_word_of_the_responder_may_cross_the_initiators_route(large: tuple[Side, Side]) -> None:
    for crossing in (pipe.Reroute(), pipe.Received()):
        alice, bob = Side(True, pipe.BULK_FROM), Side(False, pipe.BULK_FROM)
        share_offers(alice, bob)
        open_way(alice, bob)
        for sender, receiver in ((alice, bob), (bob, alice)):
            tell(sender, receiver, sender.sealed)
        move_over(alice, bob, pipe.BULK_FROM if crossing == pipe.Received() else 7)
        if crossing == pipe.Received():
            bob.exchange.pipe.check_whole()
        said = bob.send(crossing)
        route = alice.send(pipe.Route(None, 0))
        assert alice.receive(said) == [crossing]
        bob.receive(route)
        tell(bob, alice, pipe.Route(None, bob.exchange.pipe.num_received))
        for sender, receiver in ((alice, bob), (bob, alice)):
            tell(sender, receiver, *sender.chunks())
        assert_can_commit(alice, bob)


@pytest.mark.parametrize("received", [-1, 1, 2**63, pipe.BULK_FROM, pipe.BULK_FROM + 1])
def test_an_offset_that_cannot_be_is_refused(large: tuple[Side, Side], received: int) -> None:
    alice, bob = large
    open_way(alice, bob)
    if received != 1:
        refuse(alice, bob, pipe.Route(None, received))
        return
    with pytest.raises(LocalProtocolError):
        alice.send(pipe.Route(None, received))
    bob.receive(lie(pipe.Route(None, received)))  # possible, though false: then Alice has no whole contribution


def test_a_session_has_so_many_routes(large: tuple[Side, Side]) -> None:
    alice, bob = large
    for _ in range(pipe.MAX_ROUTES):
        open_way(alice, bob)
    with pytest.raises(LocalProtocolError, match="beyond"):
        alice.send(pipe.Route(CHANNEL, 0))
    forged = Side(True, pipe.BULK_FROM)
    forged.exchange.pipe.step = pipe.RouteStep.CHANNEL
    forged.exchange.pipe.incoming.add(0, pipe.BULK_FROM)
    with pytest.raises(RemoteProtocolError, match="beyond"):
        tell(forged, bob, pipe.Route(CHANNEL, 0))


@pytest.mark.parametrize(
    "messages",
    [[pipe.Reroute(), pipe.Reroute()], [pipe.Reroute(), pipe.Received()], [pipe.Received(), pipe.Received()]],
)
def test_what_contradicts_itself_is_refused(large: tuple[Side, Side], messages: list[pipe.Control]) -> None:
    alice, bob = large
    open_way(alice, bob)
    move_over(alice, bob)
    tell(alice, bob, alice.sealed)
    bob.exchange.pipe.check_whole()
    first, second = messages
    tell(bob, alice, first)
    refuse(bob, alice, second)


def test_the_responder_names_no_channel_of_its_own(large: tuple[Side, Side]) -> None:
    alice, bob = large
    tell(alice, bob, pipe.Route(CHANNEL, 0))
    with pytest.raises(LocalProtocolError):
        bob.send(pipe.Route(b"x" * 16, 0))
    alice, forged = Side(True, pipe.BULK_FROM), Side(False, pipe.BULK_FROM)
    share_offers(alice, forged)
    tell(alice, forged, pipe.Route(CHANNEL, 0))
    forged.exchange.pipe.proposed = b"x" * 16
    with pytest.raises(RemoteProtocolError, match="not named"):
        tell(forged, alice, pipe.Route(b"x" * 16, 0))


def test_a_channel_brings_what_was_encoded_or_nothing(large: tuple[Side, Side]) -> None:
    alice, bob = large
    open_way(alice, bob)
    with pytest.raises(LocalProtocolError, match="not here yet"):
        alice.exchange.pipe.check_whole()
    move_over(alice, bob)
    with pytest.raises(RemoteProtocolError, match="no hash"):
        bob.exchange.pipe.check_whole()
    for sender, receiver in ((alice, bob), (bob, alice)):
        tell(sender, receiver, sender.sealed)
    bob.exchange.pipe.check_whole()
    for message, problem in ((pipe.Received(), "before the transfer"), (exchange.Commit(), "before the contribution")):
        with pytest.raises(LocalProtocolError, match=problem):
            alice.send(message)
    tell(bob, alice, pipe.Received())
    with pytest.raises(LocalProtocolError):
        bob.send(exchange.Accepted())  # Alice has received nothing yet, and a verdict is the last message
    incoming_of(alice).write(memoryview(bytes(pipe.BULK_FROM)))
    with pytest.raises(RemoteProtocolError, match="hash"):
        alice.exchange.pipe.check_whole()
    with pytest.raises(LocalProtocolError, match="before the transfer"):
        alice.send(pipe.Received())
