"""Repeated testnets of real daemons, for ``make soak``. Each prints its figures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from farandole.testnet.play.launch import Testnet
from farandole.testnet.play.report import PlayReport, course_lines
from farandole.testnet.play.scenario import load_scenario, parse_scenario

from .playing import silent

# FARANDOLE_SOAK_STARTS=20 for a shorter run.
NUM_STARTS = int(os.environ.get("FARANDOLE_SOAK_STARTS", "100"))

# Scenarios that no page prints; the others are run by tests/documents/test_long.py.
PLAYED_HERE = ("stages-unequal", "stages-unequal-pinned", "hour")


def figures(report: PlayReport) -> str:
    return "\n".join((f"{report.name}: {report.verdict}", *course_lines(report)))


@pytest.mark.soak
@pytest.mark.parametrize("name", PLAYED_HERE)
async def test_a_delivered_scenario_passes(name: str, tmp_path: Path) -> None:
    report = await Testnet(load_scenario(name), tmp_path / name, silent).play()
    print(f"\n{figures(report)}")
    assert report.reasons == []


@pytest.mark.soak
@pytest.mark.parametrize("start", range(NUM_STARTS))
async def test_eight_nodes_start_and_none_is_wedged(start: int, tmp_path: Path) -> None:
    run = {
        **{"name": f"start {start}", "model": "tiny"},
        "inner": {"batch_size": 4, "warmup_steps": 10, "learning_rate": 3e-3},
        "rounds": {"round_seconds": 3.0, "exchange_seconds": 10.0},
    }
    settings = {"run": run, "nodes": 8, "rounds": 6, "seed": start, "min_partners": 1}
    report = await Testnet(parse_scenario(settings), tmp_path / "out", silent).play()
    print(f"\n{figures(report)}")
    assert not any(node.wedged for node in report.nodes)
    assert report.reasons == []


@pytest.mark.soak
@pytest.mark.parametrize(("nodes", "stages"), [(8, 4), (9, 3)])
async def test_stages_learn_as_well_as_the_whole_model(nodes: int, stages: int, tmp_path: Path) -> None:
    """Compare with the uncut model at as many nodes as have drawn the data, trained on as many tokens."""
    staged = load_scenario("stages", nodes=nodes, stages=stages)
    report = await Testnet(staged, tmp_path / "stages", silent).play()
    print(f"\n{figures(report)}")
    assert report.reasons == []
    origins = [node for node in report.nodes if node.pipeline and node.pipeline.stage == 0]
    steps = round(sum(node.inner_steps for node in origins) / len(origins) / staged.rounds)
    run = {**staged.run, "rounds": {**staged.run["rounds"], "inner_steps": steps}}
    settings = {"run": run, "nodes": len(origins), "rounds": staged.rounds, "min_partners": 1, "timeout": 600.0}
    whole = await Testnet(parse_scenario(settings), tmp_path / "whole", silent).play()
    print(f"{figures(whole)}; {report.tokens} tokens in stages, {whole.tokens} whole")
    assert whole.reasons == []
    assert report.loss_merged is not None
    assert whole.loss_merged is not None
    assert report.loss_merged == pytest.approx(whole.loss_merged, rel=0.03)
