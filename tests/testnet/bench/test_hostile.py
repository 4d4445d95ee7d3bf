"""The benchmark of a hostile internet, small."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from farandole.testnet.bench.hostile import FloodResult, measure, publish
from farandole.testnet.bench.process import BenchError
from farandole.testnet.bench.report import open_bench
from farandole.testnet.bench.worker.hostile_attacks import ATTACKS


@pytest.mark.soak
def test_newcomers_are_answered_and_nothing_is_left_over(tmp_path: Path) -> None:
    """As `tests/node/mesh/test_hostile.py` has it, between processes."""
    flood = {"kinds": list(ATTACKS), "number": 50, "per_second": 10.0, "sources": 10, "patience": 1.0}
    (garbage,) = measure([("garbage", flood)], tmp_path / "log", lambda text: None)
    assert garbage.number == 50
    assert garbage.dials
    with open_bench("hostile", tmp_path) as bench:
        publish(bench, [garbage])


def test_what_strangers_cost_is_claimed_and_limited(tmp_path: Path) -> None:
    row = FloodResult("garbage", 50, 5.0, 3.0, {"descriptors": 1, "tasks": 0}, dials=10, dial_max=0.5)
    with open_bench("hostile", tmp_path) as bench:
        publish(bench, [row])
        claims = json.loads((tmp_path / "hostile.json").read_text())["claims"]
        assert [claim["ours"] for claim in claims] == ["0.50", "0", "3", "1"]
        bad = replace(row, over_mb=65.0, left_over={"tasks": 7}, dial_max=2.5, failures=["1 s: refused"])
        with pytest.raises(BenchError, match="honest dials that failed, of 21: 1, not at most 0; garbage: memory"):
            publish(bench, [row, bad])
    assert len(json.loads((tmp_path / "hostile.json").read_text())["misses"]) == 4
