"""The benchmark of a hostile internet, small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farandole.testnet.bench import hostile
from farandole.testnet.bench.hostile import Flood, measure, publish
from farandole.testnet.bench.process import BenchError
from farandole.testnet.bench.report import open_bench
from farandole.testnet.bench.worker.hostile_attacks import ATTACKS


def test_newcomers_are_answered_and_nothing_is_left_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile, "WARM_UP_CYCLES", 20)
    flood = Flood("garbage", list(ATTACKS), 50, 10.0, 10, 1.0)
    garbage, cycles = measure([flood], 40, tmp_path / "log", lambda text: None)
    assert (garbage.number, cycles.number) == (50, 40)
    assert garbage.dials
    assert not garbage.failures
    for row in (garbage, cycles):
        for before, _, after in (row.descriptors, row.tasks):
            assert after <= before + hostile.MAX_LEFT_OVER
        assert row.lines_per_minute == 0
    with open_bench("hostile", tmp_path) as bench:
        publish(bench, [garbage, cycles])
        slowest, failed, _ = json.loads((tmp_path / "hostile.json").read_text())["claims"]
        assert float(slowest["ours"]) < hostile.MAX_DIAL_SECONDS
        assert failed["ours"] == "0"
        cycles.over_mb = 65.0
        with pytest.raises(BenchError, match="one peer comes and goes: memory rose by 65 MB"):
            publish(bench, [garbage, cycles])
