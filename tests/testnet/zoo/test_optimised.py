"""An attacker that searches: it finds what costs more than what it began with, and a run plays what it found."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from farandole.protocol.run.rules import GuardConfig, ScreeningRules
from farandole.testnet.bench.attacker import CASES, CHOSEN, COMPARED
from farandole.testnet.zoo.optimised import FIRST, Policy, search
from farandole.testnet.zoo.simulation import HostileOutcome, HostileRun, play

from ...tolerance import TOLERANT


def _costs(policies: Sequence[Policy]) -> list[float]:
    """Of a guard that sees all but steps ahead."""
    return [-((each.ahead - 2.5) ** 2) - each.apart**2 - each.uphill**2 for each in policies]


def test_a_search_finds_what_its_beginnings_did_not_have() -> None:
    best, cost = search(_costs, 6, random.Random(0))
    assert cost == _costs([best])[0] > 0.5 * max(_costs(FIRST))
    assert best.ahead > max(each.ahead for each in FIRST)


OVERSHOOT = Policy(ahead=1.0)


def _compared(rounds: int, seed: int = 0) -> HostileRun:
    """Return a run of six honest members, with what differs most from what is chosen by default."""
    return next(case for case in CASES if case.settings == COMPARED).alone(rounds, seed)


def test_members_that_overshoot_lead_a_young_run_hardly_further_than_it_goes_by_itself() -> None:
    """The loss of each mean gets better by it, and only much later that of the run gets worse."""
    alone = replace(_compared(rounds=4), honest=3)
    attacked = play(replace(alone, attack=OVERSHOOT, hostile=1))
    assert attacked.hostile_exchanges > 0
    assert attacked.travelled < 1.1 * play(alone).travelled


@pytest.mark.soak
def test_members_that_overshoot_cost_little_in_the_end() -> None:
    above = []
    for seed in range(3):
        alone = _compared(rounds=25, seed=seed)
        attacked = play(replace(alone, attack=OVERSHOOT, hostile=2))
        above.append(attacked.loss / play(alone).loss - 1)
    assert max(above) < 0.015


def _attacked(screening: ScreeningRules) -> HostileOutcome:
    alone = next(case for case in CASES if case.settings == CHOSEN).alone(rounds=8, seed=0)
    manifest = msgspec.structs.replace(alone.manifest, screening=screening)
    return play(HostileRun(manifest, Policy(ahead=1.6, apart=0.4), honest=3, hostile=1, rounds=8, steps=4))


def test_what_it_found_harms_a_run_that_is_chosen_by_default_and_less_with_the_guard() -> None:
    tolerant, guarded = _attacked(TOLERANT), _attacked(GuardConfig())
    assert guarded.hostile_exchanges > 0
    assert guarded.loss < 0.98 * tolerant.loss
