"""Testnets of real daemons, many times over: what ``make soak`` is for. Each prints its figures."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from farandole.testnet.launch import Testnet
from farandole.testnet.report import Report
from farandole.testnet.scenario import load_scenario, parse_scenario

# FARANDOLE_SOAK_STARTS=20 for a shorter evening.
NUM_STARTS = int(os.environ.get("FARANDOLE_SOAK_STARTS", "100"))


class Quiet:
    """Nobody watches."""

    def say(self, text: str) -> None: ...

    def show(self, nodes: object, seconds: float, scenario: object) -> None: ...


def figures(report: Report) -> str:
    exchanges = sum(node.exchanges_ok for node in report.nodes) // 2
    alone = sum(node.exchanges_alone for node in report.nodes)
    failed = sum(node.exchanges_failed for node in report.nodes)
    return (
        f"{report.name}: {report.verdict} in {report.seconds:.0f} s, {exchanges} exchanges, {alone} steps alone, "
        f"{failed} exchanges failed, merged loss {report.loss_merged or 0:.3f}, "
        f"wedged {sum(node.wedged for node in report.nodes)}"
    )


needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="the extra 'hf' is not installed")


@pytest.mark.soak
@pytest.mark.parametrize(
    "name",
    [
        *("churn", "unequal", "overlap", "slow-link", "slow-link-blocking"),
        pytest.param("llama-stages", marks=needs_transformers),
    ],
)
async def test_a_delivered_scenario_passes(name: str, tmp_path: Path) -> None:
    report = await Testnet(load_scenario(name), tmp_path / name, Quiet()).play()
    print(f"\n{figures(report)}")
    assert report.reasons == []


@pytest.mark.soak
@pytest.mark.parametrize("start", range(NUM_STARTS))
async def test_eight_nodes_start_and_none_is_wedged(start: int, tmp_path: Path) -> None:
    scenario = parse_scenario(
        {
            "nodes": 8,
            "rounds": 6,
            "seed": start,
            "start_interval": 0.0,
            "min_partners": 1,
            "run": {
                "name": f"start {start}",
                "model": "tiny",
                "inner": {"batch_size": 4, "warmup_steps": 10, "learning_rate": 3e-3},
                "rounds": {"round_seconds": 3.0, "exchange_seconds": 10.0},
            },
        }
    )
    report = await Testnet(scenario, tmp_path / "out", Quiet()).play()
    print(f"\n{figures(report)}")
    assert not any(node.wedged for node in report.nodes)
    assert report.reasons == []
