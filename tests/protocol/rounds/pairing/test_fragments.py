"""Partners that exchange one fragment of the model per round."""

from __future__ import annotations

import pytest

from farandole.protocol.rounds.pairing_events import ContributionReady, ExchangeEnded, RoundStarted, State
from farandole.protocol.rounds.pairing_messages import Begin, Decline, Propose, Ready, Withdraw
from farandole.protocol.rounds.pairing_waits import WAIT_SHARE
from farandole.protocol.trainer.trainer_messages import UseFragment
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.timers import TimerFired

from .nodes import ALICE, BOB, BOXED, LOW, Node, only_proposal


def of_fragment(session: bytes, fragment: int) -> bytes:
    return session[:-1] + bytes((fragment,))


def with_fragments() -> Node:
    alice = Node(ALICE, BOXED, frozenset((BOB,)), num_fragments=3)
    alice.handle(RoundStarted(7), 0.0)
    return alice


def test_every_fragment_has_its_turn() -> None:
    alice = Node(ALICE, BOXED, num_fragments=3)
    used = []
    for index in range(6):
        (use,) = alice.handle(RoundStarted(index), 40.0 * index)
        assert isinstance(use, UseFragment)
        used.append(use.fragment)
        alice.handle(ContributionReady(index, use.fragment), 40.0 * index + 39.0)
    assert used == [0, 1, 2, 0, 1, 2]


def test_who_is_not_ready_takes_the_fragment_that_is_proposed() -> None:
    alice = with_fragments()
    session = of_fragment(LOW, 2)
    alice.hear(BOB, Propose(session, 20.0), 20.0)
    assert UseFragment(7, 2) in alice.outputs
    assert alice.machine.partner == BOB
    alice.handle(ContributionReady(7, 2), 40.0)
    assert alice.sent == [(BOB, Ready(session))]


def test_who_is_ready_refuses_another_fragment_and_proposes_its_own() -> None:
    alice = with_fragments()
    alice.handle(ContributionReady(7, 1), 10.0)
    _, proposal = only_proposal(alice)
    assert proposal.session[-1] == 1
    alice.hear(BOB, Propose(of_fragment(LOW, 2), 0.0), 10.5)
    assert alice.sent == [(BOB, Decline(of_fragment(LOW, 2), "fragment"))]
    alice.hear(BOB, Propose(of_fragment(LOW, 1), 0.0), 11.0)
    assert alice.machine.partner == BOB


def test_a_contribution_made_before_the_fragment_was_agreed_on_parts_the_partners() -> None:
    alice = with_fragments()
    session = of_fragment(LOW, 2)
    alice.hear(BOB, Propose(session, 0.5), 39.5)
    alice.handle(ContributionReady(7, 0), 39.6)
    assert (BOB, Withdraw(session)) in alice.sent
    assert alice.machine.partner is None


def test_a_proposal_for_a_fragment_that_there_is_not_breaks_the_protocol() -> None:
    alice = with_fragments()
    with pytest.raises(RemoteProtocolError, match="fragment 3 of 3"):
        alice.hear(BOB, Propose(of_fragment(LOW, 3), 20.0), 20.0)
    assert alice.machine.state is State.SEEKING


def test_a_fragment_whose_exchange_broke_keeps_its_turn() -> None:
    alice = with_fragments()
    alice.hear(BOB, Propose(of_fragment(LOW, 2), 20.0), 20.0)
    alice.handle(ContributionReady(7, 2), 40.0)
    alice.hear(BOB, Ready(of_fragment(LOW, 2)), 40.0)
    alice.hear(BOB, Begin(of_fragment(LOW, 2)), 40.0)
    alice.handle(ExchangeEnded(of_fragment(LOW, 2), BOB, committed=False, is_broken=True), 42.0)
    alice.handle(TimerFired(), 50.0)
    _, proposal = only_proposal(alice)
    assert proposal.session[-1] == 2
    alice.handle(TimerFired(), 40.0 + WAIT_SHARE * 30.0)
    used = [output.fragment for output in alice.handle(RoundStarted(8), 60.0) if isinstance(output, UseFragment)]
    assert used == [0]
    assert alice.machine._num_exchanged == [0, 0, 1]
