"""The benchmark of time: against a measured run, and joined with loss curves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from farandole.protocol.run.manifest import RoundConfig
from farandole.testnet.bench.process import BenchError
from farandole.testnet.bench.walltime import (
    BLOCKING,
    OVERLAPPING,
    WAYS,
    Case,
    Losses,
    loss_grid,
    play,
    read_losses,
    run,
)
from farandole.testnet.simulate.lines import SimulatedHome, SimulatedLine
from farandole.testnet.simulate.pace import MBIT, Lines, RunPace, Timing, draw_homes
from farandole.testnet.simulate.pairing import PairingScenario, simulate


@pytest.mark.parametrize(
    ("overlap", "exchange_seconds", "size", "busy"),
    # BENCHMARKS.md, "A slow link": daemons behind the kernel's tbf, 20 Mbit/s up, 100 down, 50 ms.
    [(False, 30.0, 11.71e6, 0.65), (True, 10.0, 0.74e6, 0.995)],
)
def test_four_homes_are_as_busy_as_the_measured_ones(
    overlap: bool, exchange_seconds: float, size: float, busy: float
) -> None:
    rounds = RoundConfig(round_seconds=10.0, exchange_seconds=exchange_seconds, overlap=overlap)
    homes = [SimulatedHome(SimulatedLine(20 * MBIT, 100 * MBIT), 0.12)] * 4
    scenario = PairingScenario(
        4, rounds, 600.0, start_spread=2.0, homes=homes, contribution_bytes=size, latency=(0.05, 0.001)
    )
    assert simulate(scenario, seed=1).utilisation == pytest.approx(busy, abs=0.03)


def test_pairs_wait_less_than_all_and_overlapping_ones_hardly() -> None:
    timing = Timing()
    paces = {way: play(Case(16, way), timing, timing, seed=1) for way in WAYS}
    assert paces[OVERLAPPING].busy > 0.95 > paces[BLOCKING].busy
    for way in set(WAYS) - {OVERLAPPING, BLOCKING}:
        assert paces[OVERLAPPING].seconds_per_step < paces[BLOCKING].seconds_per_step < paces[way].seconds_per_step


def test_without_churn_a_barrier_of_equal_nodes_takes_its_closed_form() -> None:
    timing = Timing(ratio=1.0, has_churn=False, contribution_bytes=1.0)
    pace = play(Case(8, "gathered"), timing, timing, seed=1)
    assert pace.round_seconds == pytest.approx(timing.interval * timing.fastest_step, rel=0.03)
    assert pace.busy > 0.97


def test_a_ring_that_members_leave_starts_again_and_a_gathered_group_goes_on() -> None:
    timing = Timing(contribution_bytes=64e6, exchange_seconds=480.0)
    ring, calm, gathered = (
        play(Case(1_000, way), replace(timing, has_churn=churn), timing, seed=1)
        for way, churn in (("ring", True), ("ring", False), ("gathered", True))
    )
    assert ring.round_seconds > 1.5 * calm.round_seconds
    assert gathered.round_seconds < 1.1 * calm.round_seconds


def test_lines_that_the_run_does_not_admit_are_no_members() -> None:
    homes = draw_homes(200, Lines(), Timing(), seed=1)
    assert min(min(home.line.up, home.line.down) for home in homes) >= Timing().least_rate
    assert max(home.step_seconds for home in homes) == pytest.approx(4 * min(home.step_seconds for home in homes))


def test_hours_to_a_loss_are_steps_to_it_times_the_seconds_of_one() -> None:
    losses = Losses(8, 10, {"DiLoCo": [(10, 4.0), (20, 2.0)], "pairs": [(10, 3.0), (20, 2.5)]})
    assert losses.steps_to("DiLoCo", 3.0) == 15.0
    assert losses.steps_to("DiLoCo", 1.0) is None
    paces = [RunPace(0.0, 720.0, 1.0)]
    grid = loss_grid(losses, {("DiLoCo", "ring"): paces, ("pairs", BLOCKING): paces})
    assert [row[3:5] for row in grid.rows] == [["18", "3.50"], ["20", "4.00"]]


def test_it_writes_tables_with_times_to_a_loss(tmp_path: Path) -> None:
    curve = [[10, 4.0], [20, 3.0]]
    names = ("DiLoCo", "NoLoCo, Nesterov, int8", "nobody averages")
    results = [{"method": name, "curve": curve} for name in names]
    file = tmp_path / "compare.json"
    file.write_text(json.dumps({"settings": {"nodes": 4, "interval": 10}, "results": results}))
    run(nodes="4", seeds=1, interval=10, parameters=1.0, ratio=4.0, churn=True, steps=100, compare=file, out=tmp_path)
    written = (tmp_path / "time.md").read_text()
    assert "| NoLoCo, Nesterov, int8 | pairs, blocking |" in written
    assert written.count("| DiLoCo | ") == 3
    assert "4 nodes, pairs, overlapping" in json.loads((tmp_path / "time.json").read_text())


@pytest.mark.parametrize("text", ["", "{}", '{"settings": {"nodes": 4, "interval": 10}, "results": []}'])
def test_a_file_without_curves_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "compare.json"
    file.write_text(text)
    with pytest.raises(BenchError, match="loss curves"):
        read_losses(file)
