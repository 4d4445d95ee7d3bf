"""The benchmarks of faults and of the race: results, which plays do not pass, and what is read off the curves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from farandole.protocol.run.rules import SLOW
from farandole.testnet.bench.faults import run
from farandole.testnet.bench.process import BenchError, BenchWorker, ask_all, open_workers
from farandole.testnet.bench.race import Replacement, replacements, seconds_to
from farandole.testnet.bench.worker.race import OUTER
from farandole.testnet.play.fault import Fault, FaultReport
from farandole.testnet.play.launch import SCENARIO_NAME, write_report
from farandole.testnet.play.report import Growth, PlayReport
from farandole.testnet.play.scenario import ScenarioError, load_scenario

from ...node.small_runs import small_manifest
from ..play.playing import PASSED, node

PLAY = msgspec.structs.replace(PASSED, seconds=120.0)


def keep(report: PlayReport, folder: Path) -> None:
    folder.mkdir(parents=True)
    write_report(report, folder)
    scenario = load_scenario(report.name)
    played = scenario.clean if folder.name == "clean" else scenario
    (folder / SCENARIO_NAME).write_bytes(msgspec.json.encode(played))


def halves(out: Path, loss_merged: float) -> None:
    clean = msgspec.structs.replace(PLAY, name="halves", nodes=[node(index) for index in range(8)])
    keep(clean, out / "halves" / "clean")
    partition = FaultReport("partition", [0, 1, 2, 3], 40.0, 60.0, {}, healed_in=7.25)
    keep(
        msgspec.structs.replace(clean, faults=[partition], loss_merged=loss_merged, spread=0.011),
        out / "halves" / "faults",
    )


def test_plays_that_are_there_are_judged_and_shown_not_played_again(tmp_path: Path) -> None:
    halves(tmp_path, loss_merged=2.02)
    growth = Growth(hours=0.6, memory=0.004, trainer_memory=-0.001, descriptors=1, tasks=0)
    nodes = [node(0, growths=[growth]), *map(node, range(1, 8))]
    hour = msgspec.structs.replace(PLAY, name="hour", nodes=nodes)
    keep(hour, tmp_path / "hour" / "faults")
    line = [node(index, exchange_seconds=[3.0, 4.0, 5.0], exchange_bytes=1_000_000) for index in range(4)]
    keep(msgspec.structs.replace(PLAY, name="bad-line", nodes=line), tmp_path / "bad-line" / "faults")
    run(["halves", "bad-line", "hour"], tmp_path)
    report = json.loads((tmp_path / "faults.json").read_text())
    assert report["misses"] == []
    claims = {claim["claim"]: claim["ours"] for claim in report["claims"]}
    for claim, measured in {
        "`halves`: one run state after healing (limit: within 15 s)": "7.2 s",
        "`halves`: held-out loss beside clean (limit: at most +3.0%)": "+1.0%",
        "`halves`: spread of the weights, of clean (limit: at most 1.25)": "1.10",
        # 1 MB at 5 Mbit/s takes 1.6 s, and the round trip 0.2 s.
        "`bad-line`: an exchange over the ideal (median, worst node) (limit: at most 3)": "2.22",
        "`hour`: memory an hour, worst life (limit: at most +1.0%)": "+0.40%",
        "`hour`: descriptors, worst life (limit: at most +8)": "+1",
    }.items():
        assert claims[claim] == measured


def test_what_misses_its_limit_is_said(tmp_path: Path) -> None:
    halves(tmp_path, loss_merged=2.2)
    reason = "halves: held-out loss beside clean: +10.0%, not at most +3.0%"
    with pytest.raises(BenchError, match=re.escape(reason)):
        run(["halves"], tmp_path)
    assert reason in (tmp_path / "faults.json").read_text()


def test_it_plays_scenarios_of_faults_alone(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="no scenario of faults: demo; there are starved"):
        run(["demo"], tmp_path)


def test_when_a_curve_reaches_a_loss() -> None:
    falling = [(10.0, 5.0), (20.0, 4.0), (30.0, 4.2), (40.0, 3.0)]
    assert seconds_to(falling, 5.5) == 10.0
    assert seconds_to(falling, 4.5) == pytest.approx(15.0)
    assert seconds_to(falling, 3.6) == pytest.approx(35.0)
    assert seconds_to(falling, 2.0) is None


def test_who_is_replaced_when() -> None:
    scenario = load_scenario("race")
    assert replacements(scenario) == [Replacement(120.0, 7, 8), Replacement(240.0, 1, 9), Replacement(360.0, 4, 10)]
    for change in replacements(scenario):
        assert scenario.seconds_of_step(change.gone) == scenario.seconds_of_step(change.come)
    frozen = Fault("freeze", nodes=(0,), at_round=3, duration=1.0)
    with pytest.raises(BenchError, match="replaced"):
        replacements(msgspec.structs.replace(scenario, fault=(frozen,)))


def average(members: list[BenchWorker], group: Path) -> None:
    ranks: list[dict[str, Any]] = [{"rank": rank} for rank in range(len(members))]
    ask_all(members, "average", ranks, world=len(members), group=str(group), device="lo")


def weights_of(members: list[BenchWorker], folder: Path) -> list[dict[str, torch.Tensor]]:
    paths = [folder / f"{number}.safetensors" for number in range(len(members))]
    ask_all(members, "save", [{"path": str(path)} for path in paths])
    return [load_file(path) for path in paths]


def test_members_take_the_step_of_the_paper_and_a_newcomer_takes_part(tmp_path: Path) -> None:
    settings = msgspec.to_builtins(small_manifest(data={"source": "stdlib"}))
    log = tmp_path / "log"
    with open_workers("race:DiLoCoMember", [f"member {number}" for number in range(3)], log) as (one, two, three):
        everybody = [one, two, three]
        authors = [{"author": number} for number in range(3)]
        ask_all(everybody, "begin", authors, manifest=settings, step_seconds=0.0)
        (start, *_) = weights_of([one], tmp_path)
        ask_all([one, two], "learn", steps=3)
        average([one, two], tmp_path / "group")
        first, second = weights_of([one, two], tmp_path)
        assert all(torch.equal(first[name], second[name]) for name in first if name.startswith((SLOW, "momentum")))
        names = [name.removeprefix("momentum/") for name in first if name.startswith("momentum/")]
        assert any(not torch.equal(first[f"{SLOW}/{name}"], start[f"{SLOW}/{name}"]) for name in names)
        for name in names:  # the first momentum is the outer rate times the mean of what both have moved
            step = (1 + OUTER.alpha) * first[f"momentum/{name}"]
            assert torch.allclose(first[f"{SLOW}/{name}"], start[f"{SLOW}/{name}"] + step, atol=1e-6)
        three.ask("load", path=str(tmp_path / "0.safetensors"))
        two.kill()
        ask_all([one, three], "learn", steps=1)
        average([one, three], tmp_path / "another-group")
        first, third = weights_of([one, three], tmp_path)
        assert all(torch.equal(first[name], third[name]) for name in first if name.startswith((SLOW, "momentum")))
