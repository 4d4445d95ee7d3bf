"""Rounds without inner steps, in which a node meets another partner right after the one before."""

from __future__ import annotations

import pytest

from farandole.protocol.rounds.pairing import PROPOSE_UNTIL
from farandole.protocol.rounds.pairing_events import (
    ContributionReady,
    ExchangeEnded,
    GoAlone,
    RoundStarted,
    StartExchange,
)
from farandole.protocol.rounds.pairing_messages import Agree, Begin, Busy, Propose, Ready
from farandole.protocol.rounds.pairing_waits import MEETING_RETRY_SHARE, MEETING_WAIT, MIN_MEETING_WAIT, WAIT_SHARE
from farandole.protocol.wire.timers import TimerFired

from .nodes import ALICE, BOB, BOXED, CAROL, LOW, MALLORY, SEVERAL, Node, only_proposal

EXCHANGE_SECONDS = 2.0


def after_a_meeting() -> Node:
    """Return Alice after her exchange with Bob, in a round whose inner steps took from 0 to 40."""
    alice = Node(ALICE, SEVERAL, frozenset((BOB, CAROL)))
    alice.handle(RoundStarted(6), 0.0)
    alice.hear(BOB, Propose(LOW, 40.0), 0.0)
    alice.handle(ContributionReady(6), 40.0)
    alice.hear(BOB, Ready(LOW), 40.0)
    alice.hear(BOB, Begin(LOW), 40.0)
    alice.handle(ExchangeEnded(LOW, BOB, committed=True, seconds=EXCHANGE_SECONDS), 42.0)
    return alice


def in_the_next_round() -> Node:
    alice = after_a_meeting()
    alice.handle(RoundStarted(7), 43.0)
    return alice


def test_another_partner_is_sought_at_once() -> None:
    alice = in_the_next_round()
    peer, proposal = only_proposal(alice)
    assert proposal.seconds_left == 0.0
    alice.handle(ContributionReady(7), 43.1)
    alice.hear(peer, Agree(proposal.session, 0.0), 43.2)
    alice.hear(peer, Ready(proposal.session), 43.3)
    assert any(isinstance(output, StartExchange) for output in alice.outputs)


def test_peers_that_still_exchange_are_asked_again_soon() -> None:
    alice = after_a_meeting()
    alice.hear(CAROL, Propose(LOW, 0.0), 42.1)  # between two rounds
    ((_, answer),) = alice.sent
    assert isinstance(answer, Busy)
    assert answer.retry_after == pytest.approx(MEETING_RETRY_SHARE * MEETING_WAIT * EXCHANGE_SECONDS)


def test_during_inner_steps_a_busy_peer_is_asked_again_no_sooner_than_with_one_partner() -> None:
    """A node proposes a limited number of times in a round, and inner steps may take an hour."""
    answers = []
    for config in (BOXED, SEVERAL):
        alice = Node(ALICE, config, frozenset((BOB, CAROL)))
        alice.handle(RoundStarted(6), 0.0)
        alice.propose(PROPOSE_UNTIL * 40.0)
        alice.hear(MALLORY, Propose(LOW, 10.0), 30.0)  # Alice has not heard of Mallory yet
        ((_, answer),) = alice.sent
        assert isinstance(answer, Busy)
        answers.append(answer)
    assert answers[0] == answers[1]


def test_a_node_without_a_partner_goes_on_soon() -> None:
    alice = in_the_next_round()
    proposals = [only_proposal(alice)]
    alice.handle(ContributionReady(7), 43.0)
    for _ in range(2):
        peer, proposal = proposals[-1]
        alice.hear(peer, Busy(proposal.session, 60.0), 43.1)
        proposals += [(peer, message) for peer, message in alice.sent if isinstance(message, Propose)]
    assert [type(output) for output in alice.outputs] == [GoAlone]
    assert alice.machine.wait_ends_at < 43.0 + WAIT_SHARE * SEVERAL.exchange_seconds


@pytest.mark.parametrize("seconds_left", [1.0, 39.0])
def test_inner_steps_are_not_cut_short_for_a_peer_that_has_none(seconds_left: float) -> None:
    alice = Node(ALICE, SEVERAL, frozenset((BOB, CAROL)))
    alice.handle(RoundStarted(6), 0.0)
    alice.hear(BOB, Propose(LOW, 0.0), 40.0 - seconds_left)
    ((_, answer),) = alice.sent
    assert isinstance(answer, Agree if seconds_left / 2 <= MIN_MEETING_WAIT else Busy)


def test_the_time_of_inner_steps_is_that_of_rounds_that_have_some() -> None:
    alice = in_the_next_round()
    alice.handle(ContributionReady(7), 43.0)
    alice.handle(TimerFired(), 43.0 + WAIT_SHARE * SEVERAL.exchange_seconds)
    alice.handle(RoundStarted(8), 60.0)
    assert alice.machine.current.ends_at == 100.0
