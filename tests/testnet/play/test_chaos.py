from __future__ import annotations

import itertools
from collections import Counter

import pytest

from farandole.testnet.play.fault import DURATIONS, Chaos, Fault, draw_faults
from farandole.testnet.play.scenario import load_scenario

LONG = Chaos(seconds=1_800.0, faults=60)
SHORT = Chaos(seconds=75.0, faults=12)


def spans(faults: tuple[Fault, ...]) -> list[tuple[Fault, float, float]]:
    return [(fault, fault.after_start or 0.0, (fault.after_start or 0.0) + (fault.duration or 0.0)) for fault in faults]


def test_it_is_a_function_of_the_seed() -> None:
    assert draw_faults(LONG, 16, 7) == draw_faults(LONG, 16, 7)
    assert draw_faults(LONG, 16, 7) != draw_faults(LONG, 16, 8)


@pytest.mark.parametrize("seed", range(50))
@pytest.mark.parametrize(("chaos", "num_nodes", "calm"), [(LONG, 16, 60.0), (SHORT, 6, 25.0)])
def test_every_schedule_can_be_judged(seed: int, chaos: Chaos, num_nodes: int, calm: float) -> None:
    drawn = spans(draw_faults(chaos, num_nodes, seed))
    assert len(drawn) == chaos.faults
    assert [begins_at for _, begins_at, _ in drawn] == sorted(begins_at for _, begins_at, _ in drawn)
    assert max(ends_at for _, _, ends_at in drawn) <= chaos.seconds - calm
    for (fault, begins_at, ends_at), (other, other_begins_at, other_ends_at) in itertools.combinations(drawn, 2):
        if begins_at <= other_ends_at and other_begins_at <= ends_at:
            assert not set(fault.nodes) & set(other.nodes), "a node has one fault at a time"
            assert (fault.kind, other.kind) != ("partition", "partition")
    for _, moment, _ in drawn:
        away = [node for fault, begins_at, ends_at in drawn if begins_at <= moment <= ends_at for node in fault.nodes]
        assert len(away) <= num_nodes // 2


def test_every_kind_has_its_share() -> None:
    assert Counter(fault.kind for fault in draw_faults(LONG, 16, 1)) == dict.fromkeys(DURATIONS, 10)
    two = Chaos(seconds=600.0, faults=10, kinds=("restart", "freeze"))
    assert Counter(fault.kind for fault in draw_faults(two, 8, 1)) == {"restart": 5, "freeze": 5}


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="no room for 500 faults"):
        draw_faults(Chaos(seconds=60.0, faults=500), 4, 0)


def test_the_scenario_has_its_faults_unless_it_is_to_be_clean() -> None:
    chaos = load_scenario("chaos")
    assert chaos.chaos is not None
    assert chaos.fault == draw_faults(chaos.chaos, chaos.nodes, chaos.seed)
    assert chaos.clean.fault == ()
    assert load_scenario("chaos", seed=3).fault != chaos.fault
