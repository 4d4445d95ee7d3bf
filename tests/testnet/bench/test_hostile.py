"""The benchmark of a hostile internet, small."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from farandole.testnet.bench.hostile import FloodResult, publish
from farandole.testnet.bench.process import BenchError
from farandole.testnet.bench.report import open_bench


def test_what_strangers_cost_is_claimed_and_limited(tmp_path: Path) -> None:
    row = FloodResult("garbage", 3.0, {"descriptors": 1, "tasks": 0}, dials=10, dial_max=0.5)
    with open_bench("hostile", tmp_path) as bench:
        publish(bench, [row])
        claims = json.loads((tmp_path / "hostile.json").read_text())["claims"]
        assert [claim["ours"] for claim in claims] == ["0.50", "0", "3", "1"]
        bad = replace(row, over_mb=65.0, left_over={"tasks": 7}, dial_max=2.5, failures=["1 s: refused"])
        with pytest.raises(BenchError, match="honest dials that failed, of 21: 1, not at most 0; garbage: memory"):
            publish(bench, [row, bad])
    assert len(json.loads((tmp_path / "hostile.json").read_text())["misses"]) == 4
