"""A received contribution counts only with its sender's hash, which comes once and in time."""

from __future__ import annotations

import pytest

from farandole.protocol.exchange.pipe import BULK_FROM, DIGEST_BYTES, Received, Route, Sealed
from farandole.protocol.wire.errors import LocalProtocolError, RemoteProtocolError

from .sides import CHANNEL, Side, assert_can_commit, move_over, open_way, share_offers, take_whole, tell


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
    bob.exchange.pipe.incoming.seal(alice.sealed.digest)  # as if it had been sent
    bob.exchange.pipe.check_whole()
    lie = bob.send(Received())
    with pytest.raises(RemoteProtocolError, match="before"):
        alice.receive(lie)
