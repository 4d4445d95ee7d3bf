"""A received contribution counts only with its sender's hash, which comes once and in time."""

from __future__ import annotations

import pytest

from farandole.protocol.exchange.pipe import DIGEST_BYTES, Received, Sealed
from farandole.protocol.wire.errors import LocalProtocolError, RemoteProtocolError

from .sides import Side, move_over, open_way, share_offers, tell


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


def test_nobody_has_received_what_is_not_encoded(large: tuple[Side, Side]) -> None:
    alice, bob = large
    open_way(alice, bob)
    move_over(alice, bob)
    bob.exchange.pipe.incoming.seal(alice.sealed.digest)  # as if it had been sent
    bob.exchange.pipe.check_whole()
    lie = bob.send(Received())
    with pytest.raises(RemoteProtocolError, match="before"):
        alice.receive(lie)
