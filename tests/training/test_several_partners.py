"""Rounds without inner steps, in which a replica meets another partner right after the one before."""

from __future__ import annotations

import pytest
from torch import Tensor

from farandole.training import flat_replica
from farandole.training.screening.rule import Accept, Partner, ScreeningRule, Verdict

from .conftest import ALICE, BOB, MakeReplica


class Asking(ScreeningRule):
    """Notes the answers to what it asks, and accepts."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, float, float | None]] = []
        """(movement, alignment, loss before)."""

    def begin(self) -> None:
        pass

    def feed(self, own: Tensor, contribution: Tensor) -> None:
        pass

    def judge(self, partner: Partner) -> Verdict:
        self.asked.append((partner.movement(), partner.alignment(), partner.loss_before()))
        return Accept()


def test_a_round_without_inner_steps_is_judged_by_the_steps_before_it(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own movement is nothing, or the codec's rounding: no yardstick for a partner."""
    rule = Asking()
    monkeypatch.setattr(flat_replica, "rule_of", lambda settings: rule)
    alice, bob = (make_replica(author, codec="int8", partners=2) for author in (ALICE, BOB))
    for steps in (2, 0, 2):
        for _ in range(steps):
            alice.learn()
            bob.learn()
        contributions = [bytearray(each.contribution_bytes) for each in (alice, bob)]
        alice.contribute(contributions[0])
        bob.contribute(contributions[1])
        alice.apply(contributions[1])
    (first, before, loss), (again, aligned, unknown), (third, _, _) = rule.asked
    assert first > 0.0
    assert before < 0.0
    assert loss is not None
    assert (again, unknown) == (first, None)
    assert aligned < 0.0, "Bob's contribution still lacks what Alice's inner steps changed"
    assert third not in (0.0, first)
