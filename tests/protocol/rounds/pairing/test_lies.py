"""Dishonest peers."""

from __future__ import annotations

import pytest

from farandole.protocol.rounds.pairing_messages import MAX_MESSAGES, Agree, Begin, Propose, Ready, Withdraw
from farandole.protocol.wire.errors import RemoteProtocolError

from .nodes import BOB, CAROL, LOW, MALLORY, MIDDLE, matched, started


def test_a_flood_is_cut_off() -> None:
    alice = started()
    for _ in range(MAX_MESSAGES):
        alice.hear(BOB, Withdraw(LOW), 1.0)
    with pytest.raises(RemoteProtocolError, match="more than"):
        alice.hear(BOB, Withdraw(LOW), 1.0)
    assert alice.hear(CAROL, Withdraw(LOW), 1.0) == []
    assert alice.hear(BOB, Withdraw(LOW), 2.1) == []


def test_a_session_of_two_others_is_none_of_ones_business() -> None:
    alice, session = matched()
    for message in (Withdraw(session), Ready(session), Agree(session, 1.0), Begin(session)):
        with pytest.raises(RemoteProtocolError):
            alice.hear(MALLORY, message, 31.0)
    assert alice.machine.partner == BOB


def test_nobody_begins_an_exchange_before_we_are_ready() -> None:
    alice = started()
    alice.hear(BOB, Propose(MIDDLE, 40.0), 1.0)
    with pytest.raises(RemoteProtocolError):
        alice.hear(BOB, Begin(MIDDLE), 2.0)
