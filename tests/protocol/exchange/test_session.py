"""An exchange whose contributions move over its stream."""

from __future__ import annotations

import pytest

from farandole.protocol.exchange.exchange import (
    TRANSITIONS,
    Aborted,
    Accepted,
    Commit,
    Committed,
    Step,
    peek_offer,
    reason_of,
)
from farandole.protocol.exchange.pipe import CHUNK_FRAME_BYTES
from farandole.protocol.wire.errors import LocalProtocolError, RemoteProtocolError

from .sides import SIZE, Side, share, share_offers, tell


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


@pytest.mark.parametrize("reason", ["\x1b]0;all is well\x07", "two\nlines", "\u009b2J", "\u202etxet"])
def test_a_reason_does_nothing_to_the_terminal_that_shows_it(alice: Side, bob: Side, reason: str) -> None:
    share_offers(alice, bob)
    with pytest.raises(RemoteProtocolError):
        tell(alice, bob, Aborted(reason))


def test_a_reason_of_ones_own_may_be_said(alice: Side, bob: Side) -> None:
    share_offers(alice, bob)
    said = Aborted(reason_of("out of\nm\u00e9moire " * 100))
    assert said.reason.startswith("out of?m?moire out")
    assert tell(alice, bob, said) == [said]


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
