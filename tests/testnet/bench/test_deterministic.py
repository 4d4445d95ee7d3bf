"""The benchmark of deterministic training: its results from given figures; as a soak test, a tiny real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.testnet.bench.deterministic import DETERMINISTIC, PLAIN, StepFigures, measure
from farandole.testnet.bench.report import open_bench

TINY = {"num_layers": 1, "width": 16, "num_heads": 2, "hidden": 32, "context": 16, "vocabulary": 256}


def test_a_trainer_is_compared_turn_by_turn() -> None:
    """The machine becomes slower by half; in each turn the setting costs a tenth."""
    figures = StepFigures(3_000_000, 8)
    figures.seconds[PLAIN] += [1.0, 1.2, 1.5]
    figures.seconds[DETERMINISTIC] += [1.1, 1.32, 1.65]
    assert figures.cost(DETERMINISTIC) == pytest.approx(0.1)
    assert f"| {DETERMINISTIC} | 1.320 | +10.0% |" in figures.report({"command": "c", "date": "d"}).markdown()


@pytest.mark.soak
def test_a_tiny_one(tmp_path: Path) -> None:
    run_file = {"name": "bench", "model": TINY, "inner": {"batch_size": 2}}
    with open_bench("deterministic", tmp_path / "out") as bench:
        figures = measure(bench, run_file, turns=2, turn_seconds=0.01, device="cpu")
    assert {PLAIN, DETERMINISTIC} <= figures.seconds.keys()
    assert all(len(seconds) == 2 for seconds in figures.seconds.values())
