"""The benchmark of invented authors: its table has a row for each kind of run, with the worst seed's figures."""

from __future__ import annotations

from dataclasses import replace

from farandole.testnet.bench.sybils import report, scenarios
from farandole.testnet.simulate.sybils import QUOTA, SybilOutcome, play

OUTCOME = SybilOutcome(1.0, 0, True, (0.5, 1.0, 9.0), 3.0, 2_000.0)


def test_a_row_gives_the_worst_seed() -> None:
    lost = replace(OUTCOME, kept=0.5, most_invented=1_000, delays=(0.5, 2.0, float("inf")))
    [grid] = report({}, {"open run": [OUTCOME, lost]}).grids
    assert grid.rows == [["open run", "50.00%", "1,000", "2.0", "> 25", "> 25", "3.0", "2.0"]]


def test_small_runs_are_as_full_as_large_ones() -> None:
    played = scenarios(20, 80)
    assert played["open run"].max_authors < 20 + 80
    outcomes = {name: play(scenario, seed=1) for name, scenario in played.items()}
    assert outcomes["none, open run"].most_invented == 0
    assert 0 < outcomes["open run"].most_invented < 80
    assert outcomes["invited run, without an invite"].most_invented == 0
    assert outcomes["invited run, by a member with a quota"].most_invented == QUOTA
