"""The ends of partners' rounds: with boxes, without them, and when a round overlaps with the exchange before."""

from __future__ import annotations

import msgspec
import pytest

from farandole.protocol.rounds.pairing import MEETING_SHARE
from farandole.protocol.rounds.pairing_events import ContributionReady, ExchangeEnded, RoundStarted
from farandole.protocol.rounds.pairing_messages import Busy, Decline, Propose, Ready
from farandole.protocol.trainer.trainer_messages import FinishRound
from farandole.protocol.wire.timers import TimerFired

from .nodes import ALICE, BOB, BOXED, LOW, STEPS, matched, only_proposal, started


def test_partners_meet_in_the_middle_of_their_boxes() -> None:
    alice, _ = matched(seconds_left=4.0)  # Alice's box ends at 40, Bob's at 34
    assert alice.machine.box_ends_at == pytest.approx(37.0)
    assert alice.handle(TimerFired(), 36.9) == []
    assert alice.handle(TimerFired(), 37.0) == [FinishRound(7)]
    assert alice.handle(TimerFired(), 38.0) == []


@pytest.mark.parametrize(("seconds_left", "end"), [(1_000.0, 60.0), (0.0, 35.0)])
def test_a_box_moves_by_half_its_length_at_most(seconds_left: float, end: float) -> None:
    alice, _ = matched(seconds_left=seconds_left)
    assert alice.machine.box_ends_at == end


def test_a_partner_that_is_ready_early_is_met_while_it_is_patient() -> None:
    config = msgspec.structs.replace(BOXED, exchange_seconds=8.0)
    alice, session = matched(config, seconds_left=10.0)
    alice.hear(BOB, Ready(session), 31.0)
    assert alice.machine.box_ends_at == 31.0 + MEETING_SHARE * 8.0


def test_without_boxes_ends_far_apart_do_not_pair() -> None:
    alice = started(ALICE, STEPS, BOB)
    peer, proposal = only_proposal(alice)  # at once: it cannot estimate the length of a round yet
    alice.hear(peer, Decline(proposal.session, "matched"), 0.1)
    alice.handle(ContributionReady(7), 100.0)
    alice.handle(RoundStarted(8), 101.0)
    alice.hear(BOB, Propose(LOW, 10.0), 102.0)  # Alice has 99 seconds left
    ((_, answer),) = alice.sent
    assert isinstance(answer, Busy)
    assert answer.retry_after == pytest.approx(99 - 10 - 15)
    alice.hear(BOB, Propose(LOW, 90.0), 103.0)
    assert alice.machine.partner == BOB


# Rounds that overlap with the exchange before them


def test_a_round_that_began_before_its_partner_is_sought_ends_in_time() -> None:
    alice, session = matched()
    alice.handle(ContributionReady(7), 40.0)
    alice.hear(BOB, Ready(session), 48.0)
    alice.handle(RoundStarted(8, at=40.0), 48.0)
    assert alice.machine.box_ends_at == 80.0
    alice.handle(
        ExchangeEnded(session, BOB, committed=False), 60.0
    )  # left to the caller: the machine is already in round 8
    assert alice.outputs == []
    alice.hear(BOB, Propose(LOW, 10.0), 60.0)
    assert alice.machine.partner == BOB
