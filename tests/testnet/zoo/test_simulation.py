from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from farandole.protocol.checkpoints.sketches import NEAR
from farandole.protocol.run.manifest import InnerConfig, Manifest
from farandole.protocol.run.rules import GuardConfig, NoLoCoConfig, PlainConfig, RoundConfig, ScreeningRules
from farandole.testnet.bench.attacker import CASES, CHOSEN, COMPARED, Case
from farandole.testnet.bench.members import manifest_of
from farandole.testnet.methods.compare import MODEL
from farandole.testnet.zoo import simulation
from farandole.testnet.zoo.optimised import FIRST, Policy, search
from farandole.testnet.zoo.simulation import HostileOutcome, HostileRun, play
from farandole.training.outer.contribution import LEAST_TOKENS

from ...tolerance import TOLERANT

# Windows on which a busy machine judges.
BUSY = LEAST_TOKENS // MODEL.context
STRICT = GuardConfig(least_loss_increase=0.001, max_loss_increase=0.01)


def outcome_of(
    attack: str, screening: ScreeningRules, hostile: int = 1, rounds: int = 8, windows: int = 0
) -> HostileOutcome:
    inner = InnerConfig(learning_rate=3e-3, warmup_steps=5, total_steps=80, batch_size=8)
    outer = NoLoCoConfig(codec="bf16")
    manifest = Manifest("hostile", MODEL, inner=inner, outer=outer, screening=screening)
    return play(HostileRun(manifest, attack, honest=3, hostile=hostile, rounds=rounds, steps=5, windows=windows))


@pytest.fixture(scope="module")
def clean() -> HostileOutcome:
    return outcome_of("", STRICT, hostile=0)


def test_honest_members_are_neither_clipped_nor_refused(clean: HostileOutcome) -> None:
    assert clean.honest_exchanges > 0
    assert (clean.honest_clipped, clean.honest_refused, clean.hostile_exchanges) == (0, 0, 0)


def test_honest_members_are_near_enough_for_a_newcomers_comparison(clean: HostileOutcome) -> None:
    assert 0.0 < clean.spread < NEAR / 2


def test_without_a_guard_one_liar_ruins_the_run(clean: HostileOutcome) -> None:
    ruined = outcome_of("scale-3.9", TOLERANT, rounds=12)
    assert ruined.hostile_refused < ruined.hostile_exchanges
    assert ruined.loss > 2 * clean.loss


@pytest.mark.parametrize("attack", ["scale-3.9", "reversed-10", "initial", "nan"])
def test_with_the_guard_a_liar_does_little(attack: str, clean: HostileOutcome) -> None:
    attacked = outcome_of(attack, GuardConfig())
    assert attacked.hostile_exchanges > 0
    assert attacked.loss < 1.1 * clean.loss


@pytest.mark.parametrize("windows", [0, BUSY])
def test_a_member_that_descends_on_a_loss_costs_little(windows: int, clean: HostileOutcome) -> None:
    """The one that adapts to the guard's verdicts, also where its victims are busy."""
    attacked = outcome_of("adaptive", GuardConfig(), windows=windows)
    assert attacked.hostile_exchanges > 0
    assert attacked.loss < 1.015 * clean.loss


@pytest.mark.soak
@pytest.mark.parametrize("windows", [0, BUSY])
@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.settings)
@pytest.mark.parametrize("attack", ["exam-0.2", "exam-0.5", "exam-1", "adaptive", "colluding"])
def test_two_of_eight_that_study_the_guard_cost_little(attack: str, case: Case, windows: int) -> None:
    """By what is unlike the text that members once judged on; over three seeds, on fast and on busy machines."""
    above = []
    for seed in range(3):
        alone = replace(case.alone(25, seed), windows=windows)
        attacked = play(replace(alone, attack=attack, hostile=2))
        assert attacked.honest_refused == 0
        assert windows or case.settings == CHOSEN or attacked.honest_clipped <= 2  # who met only liars drifts
        above.append(attacked.loss / play(alone).loss - 1)
    print(f"\nloss above the honest alone: {sum(above) / len(above):+.2%}, at most {max(above):+.2%}")
    assert sum(above) / len(above) < 0.015


def test_newcomers_with_older_weights_are_neither_clipped_nor_do_they_clip_others() -> None:
    # With a rate that ends within these rounds, newcomers move too little to reach for others, whom they clip.
    inner = InnerConfig(learning_rate=3e-3, warmup_steps=5, total_steps=1_000, batch_size=8)
    manifest = Manifest("newcomers", MODEL, inner=inner, outer=NoLoCoConfig(codec="bf16"), screening=GuardConfig())
    outcome = play(HostileRun(manifest, honest=6, rounds=8, steps=10, joins_at=4, newcomers=2, lag=2))
    assert outcome.honest_exchanges > 0
    assert (outcome.honest_clipped, outcome.honest_refused) == (0, 0)


def test_members_whose_texts_differ_bear_a_liar() -> None:
    run = HostileRun(manifest_of(10, 0, GuardConfig()), honest=3, rounds=10, steps=5, texts_differ=True)
    alone, attacked = play(run), play(replace(run, attack="reversed-10", hostile=1))
    assert alone.honest_refused == 0
    assert alone.loss < play(replace(run, rounds=1)).loss
    assert attacked.hostile_exchanges > 0
    assert attacked.loss < 1.2 * alone.loss


@pytest.mark.parametrize("windows", [0, BUSY])
def test_honest_members_of_a_young_run_that_is_chosen_by_default_count_in_full(windows: int) -> None:
    alone = next(case for case in CASES if case.settings == CHOSEN).alone(rounds=25, seed=0)
    young = play(replace(alone, honest=3, rounds=10, windows=windows))
    assert young.honest_exchanges > 0
    assert (young.honest_clipped, young.honest_refused) == (0, 0)


def test_equal_runs_have_equal_outcomes(clean: HostileOutcome) -> None:
    assert outcome_of("", STRICT, hostile=0) == clean


def test_exchanges_that_overlap_with_the_next_round_end_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    blocking, overlapping = (overlap_outcome(overlap=overlap) for overlap in (False, True))
    assert blocking.honest_exchanges == overlapping.honest_exchanges > 0
    assert blocking.merged != overlapping.merged
    monkeypatch.setattr(simulation, "LATE_SHARE", 0.0)
    assert overlap_outcome(overlap=True) == blocking


def overlap_outcome(*, overlap: bool) -> HostileOutcome:
    inner = InnerConfig(learning_rate=3e-3, warmup_steps=5, total_steps=24, batch_size=8)
    rounds, outer = RoundConfig(overlap=overlap), PlainConfig(codec="int8")
    manifest = Manifest("overlap", MODEL, inner=inner, outer=outer, rounds=rounds, screening=GuardConfig())
    return play(HostileRun(manifest, honest=3, rounds=3, steps=4, slowest=3))


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
