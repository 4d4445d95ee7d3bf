"""Messages that an honest partner does not send are refused."""

from __future__ import annotations

import math

import msgspec
import pytest

from farandole.protocol.exchange.exchange import MAX_CONTROL_BYTES, Accepted, Commit, Committed, Control, Step
from farandole.protocol.exchange.pipe import CHUNK_BYTES
from farandole.protocol.wire.errors import LocalProtocolError, RemoteProtocolError

from .sides import SIZE, Side, share, share_offers, tell


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
        (5).to_bytes(4, "big") + b"\3",
    ],
)
def test_a_lying_header_is_refused_before_anything_follows_it(alice: Side, bob: Side, header: bytes) -> None:
    share_offers(alice, bob)
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
