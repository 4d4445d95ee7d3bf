"""An exchange whose contributions move over channels, which may break."""

from __future__ import annotations

import msgspec
import pytest

from farandole.protocol.exchange.exchange import Accepted, Commit
from farandole.protocol.exchange.pipe import (
    BULK_FROM,
    CONTROL_KIND,
    MAX_ROUTES,
    Control,
    Received,
    Reroute,
    Route,
    RouteStep,
)
from farandole.protocol.wire.errors import LocalProtocolError, RemoteProtocolError

from .sides import (
    CHANNEL,
    HERE,
    Side,
    assert_can_commit,
    incoming_of,
    move_over,
    open_way,
    share_offers,
    tell,
)


@pytest.mark.parametrize("named", [None, CHANNEL])
def test_without_a_channel_at_both_ends_chunks_move(large: tuple[Side, Side], named: bytes | None) -> None:
    alice, bob = large
    tell(alice, bob, Route(named, 0))
    tell(bob, alice, Route(None, 0))
    for sender, receiver in (large, large[::-1]):
        assert tell(sender, receiver, sender.sealed, *sender.chunks())[1:] == [HERE]
        assert receiver.incoming == sender.contribution
        with pytest.raises(LocalProtocolError):
            receiver.send(Received())
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
            bob.exchange.pipe.check_whole()
        said = bob.send(crossing)
        route = alice.send(Route(None, 0))
        assert alice.receive(said) == [crossing]
        bob.receive(route)
        tell(bob, alice, Route(None, bob.exchange.pipe.num_received))
        for sender, receiver in ((alice, bob), (bob, alice)):
            tell(sender, receiver, *sender.chunks())
        assert_can_commit(alice, bob)


@pytest.mark.parametrize("received", [-1, 1, 2**63, BULK_FROM, BULK_FROM + 1])
def test_an_offset_that_cannot_be_is_refused(large: tuple[Side, Side], received: int) -> None:
    alice, bob = large
    open_way(alice, bob)
    with pytest.raises(LocalProtocolError):
        alice.send(Route(None, received))
    payload = msgspec.msgpack.encode([1, None, received])
    forged = (1 + len(payload)).to_bytes(4, "big") + bytes((CONTROL_KIND,)) + payload
    if received == 1:  # possible, though false: then Alice is the one without a whole contribution
        bob.receive(forged)
        return
    with pytest.raises(RemoteProtocolError):
        bob.receive(forged)


def test_a_session_has_so_many_routes(large: tuple[Side, Side]) -> None:
    alice, bob = large
    for _ in range(MAX_ROUTES):
        open_way(alice, bob)
    with pytest.raises(LocalProtocolError, match="beyond"):
        alice.send(Route(CHANNEL, 0))
    forged = Side(True, BULK_FROM)
    forged.exchange.pipe.step = RouteStep.CHANNEL
    forged.exchange.pipe.incoming.add(0, BULK_FROM)
    with pytest.raises(RemoteProtocolError, match="beyond"):
        tell(forged, bob, Route(CHANNEL, 0))


@pytest.mark.parametrize("messages", [[Reroute(), Reroute()], [Reroute(), Received()], [Received(), Received()]])
def test_what_contradicts_itself_is_refused(large: tuple[Side, Side], messages: list[Control]) -> None:
    alice, bob = large
    open_way(alice, bob)
    move_over(alice, bob)
    tell(alice, bob, alice.sealed)
    bob.exchange.pipe.check_whole()
    first, second = messages
    tell(bob, alice, first)
    with pytest.raises(LocalProtocolError):
        bob.send(second)
    payload = msgspec.msgpack.encode(second)
    with pytest.raises(RemoteProtocolError):
        alice.receive((1 + len(payload)).to_bytes(4, "big") + bytes((CONTROL_KIND,)) + payload)


def test_the_responder_names_no_channel_of_its_own(large: tuple[Side, Side]) -> None:
    alice, bob = large
    tell(alice, bob, Route(CHANNEL, 0))
    with pytest.raises(LocalProtocolError):
        bob.send(Route(b"x" * 16, 0))
    alice, forged = Side(True, BULK_FROM), Side(False, BULK_FROM)
    share_offers(alice, forged)
    tell(alice, forged, Route(CHANNEL, 0))
    forged.exchange.pipe.proposed = b"x" * 16
    with pytest.raises(RemoteProtocolError, match="not named"):
        tell(forged, alice, Route(b"x" * 16, 0))


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
    for message, problem in ((Received(), "before the transfer"), (Commit(), "before the contribution")):
        with pytest.raises(LocalProtocolError, match=problem):
            alice.send(message)
    tell(bob, alice, Received())
    with pytest.raises(LocalProtocolError):
        bob.send(Accepted())  # Alice has received nothing yet, and a verdict is the last message
    incoming_of(alice).write(memoryview(bytes(BULK_FROM)))
    with pytest.raises(RemoteProtocolError, match="hash"):
        alice.exchange.pipe.check_whole()
    with pytest.raises(LocalProtocolError, match="before the transfer"):
        alice.send(Received())
