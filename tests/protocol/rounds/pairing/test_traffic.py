"""A node with a limited traffic budget."""

from __future__ import annotations

import pytest

from farandole.protocol.rounds.pairing import PROPOSE_UNTIL
from farandole.protocol.rounds.pairing_events import (
    ContributionReady,
    GoAlone,
    RoundStarted,
    StartExchange,
    TrafficSaved,
)
from farandole.protocol.rounds.pairing_messages import Decline, Propose, Ready
from farandole.protocol.run.manifest import RoundConfig
from farandole.protocol.wire.timers import TimerFired

from .nodes import ALICE, BOB, BOXED, CAROL, LOW, STEPS, Node, matched


@pytest.mark.parametrize("config", [BOXED, STEPS])
def test_who_saves_traffic_meets_nobody_until_there_is_some(config: RoundConfig) -> None:
    alice = Node(ALICE, config, frozenset((BOB, CAROL)))
    alice.handle(TrafficSaved(True), 0.0)
    assert not alice.handle(RoundStarted(7), 0.0)
    alice.handle(TimerFired(), PROPOSE_UNTIL * 40.0)
    assert not alice.sent
    alice.hear(BOB, Propose(LOW, 0.0), 31.0)
    assert alice.sent == [(BOB, Decline(LOW, "away"))]
    assert alice.handle(ContributionReady(7), 39.0) == [GoAlone(7, "this node saves its traffic")]

    alice.handle(RoundStarted(8), 40.0)
    alice.handle(TrafficSaved(False), 41.0)
    alice.hear(BOB, Propose(LOW, None), 42.0)
    assert alice.machine.partner == BOB


def test_who_has_to_save_in_the_middle_of_a_round_meets_its_partner_all_the_same() -> None:
    alice, session = matched()
    assert not alice.handle(TrafficSaved(True), 31.0)
    alice.handle(ContributionReady(7), 39.0)
    alice.hear(BOB, Ready(session), 39.5)
    assert any(isinstance(output, StartExchange) for output in alice.outputs)
