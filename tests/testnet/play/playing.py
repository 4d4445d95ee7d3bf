"""Invented reports of plays, and plays of fake nodes, also as a process: ``playing.py SCENARIO.toml OUT``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import trio

from farandole.protocol.run.manifest import Manifest
from farandole.testnet.play.launch import Testnet, write_report
from farandole.testnet.play.report import Merged, NodeReport, PlayReport
from farandole.testnet.play.scenario import Scenario, load_scenario

FAKE_NODE = (sys.executable, str(Path(__file__).with_name("fake_node.py")))
PASSED = PlayReport(
    name="chaos",
    run_id="00",
    verdict="pass",
    reasons=[],
    nodes=[],
    loss_first=5.5,
    loss_last=2.0,
    loss_start=5.5,
    loss_merged=2.0,
    spread=0.01,
    tokens=1_000,
    tokens_per_second=10.0,
    seconds=100.0,
    state_equal=True,
    events=[],
    tokens_per_given_second=10.0,
)


def silent(text: str) -> None:
    """Say nothing."""


def measure(manifest: Manifest, run_id: bytes, checkpoints: Sequence[Path], data: Sequence[str]) -> Merged:
    return Merged(loss_start=5.5, loss_merged=2.5, spread=0.01)


def testnet(scenario: Scenario, out: Path, *faults: str) -> Testnet:
    return Testnet(scenario, out, silent, command=[*FAKE_NODE, *faults], measure=measure)


def node(index: int, tokens: int = 1_000, **fields: object) -> NodeReport:
    """Return the report of a node that ran for a hundred seconds."""
    made = NodeReport(index, f"peer {index}", tokens=tokens, given_seconds=100.0, is_alive=True)
    return msgspec.structs.replace(made, **fields)


testnet.__test__ = False  # type: ignore[attr-defined]

if __name__ == "__main__":
    out = Path(sys.argv[2])
    write_report(trio.run(testnet(load_scenario(sys.argv[1]), out).play), out)
