"""Rounds without inner steps, in which a replica meets another partner right after the one before."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.training.outer import round_end
from farandole.training.screening.rule import Accept, Encounter, Partner, Verdict

from ..conftest import ALICE, BOB, Asking, MakeReplica, sent, train


def test_a_round_without_inner_steps_is_judged_by_the_steps_before_it(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own movement is nothing, or the codec's rounding: no yardstick for a partner."""
    asked: list[tuple[float, float | None]] = []

    def judge(partner: Partner) -> Verdict:
        asked.append((partner.movement(), partner.loss_before()))
        return Accept()

    monkeypatch.setattr(round_end, "rule_of", lambda settings: Asking(judge))
    alice, bob = (make_replica(author, codec="int8", partners=2) for author in (ALICE, BOB))
    for steps in (2, 0, 2):
        train(alice, steps)
        train(bob, steps)
        sent(alice)
        alice.round_end.apply(sent(bob))
    (first, before), second, (third, _) = asked
    assert first > 0.0
    assert before is not None
    assert second == (first, None)
    assert third not in (0.0, first)


@pytest.mark.parametrize(("missed", "is_newcomer"), [(3, False), (4, True)])
def test_a_newcomer_claims_nothing_in_all_meetings_until_it_has_met_a_member(
    make_replica: MakeReplica, tmp_path: Path, missed: int, is_newcomer: bool
) -> None:
    """Its weights are as old in a round's second meeting as in the first; two meetings are one round's age."""
    member, newcomer = (make_replica(author, partners=2) for author in (ALICE, BOB))
    member.learn()
    member.round_end.apply(None)
    member.checkpoint.save(tmp_path / "whole")
    newcomer.checkpoint.load(tmp_path / "whole")
    newcomer.catch_up(newcomer.totals.round + missed)
    claims = []
    for takes_steps, partner_claim in ((True, 0), (False, 1), (True, 100), (False, 1)):
        for each in (member, newcomer):
            train(each, int(takes_steps))
        of_member = sent(member)
        sent(newcomer)
        claims.append(newcomer.round_end.claim(takes_steps=takes_steps) > 0)
        newcomer.round_end.apply(of_member, Encounter(b"", int(claims[-1]), partner_claim))
        member.round_end.apply(None)
    assert claims == [not is_newcomer, not is_newcomer, True, True]
