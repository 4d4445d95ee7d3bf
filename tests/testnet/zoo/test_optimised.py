"""An attacker that searches: it finds what costs more than what it began with, and a run plays what it found."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from farandole.protocol.run.rules import GuardConfig, ScreeningRules
from farandole.testnet.bench.attacker import CASES, CHOSEN
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


def _attacked(screening: ScreeningRules) -> HostileOutcome:
    alone = next(case for case in CASES if case.settings == CHOSEN).alone(rounds=8, seed=0)
    manifest = msgspec.structs.replace(alone.manifest, screening=screening)
    return play(HostileRun(manifest, Policy(ahead=1.6, apart=0.4), honest=3, hostile=1, rounds=8, steps=4))


def test_what_it_found_harms_a_run_that_is_chosen_by_default_and_less_with_the_guard() -> None:
    tolerant, guarded = _attacked(TOLERANT), _attacked(GuardConfig())
    assert guarded.hostile_exchanges > 0
    assert guarded.loss < 0.98 * tolerant.loss
