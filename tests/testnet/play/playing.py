"""Play a scenario with fake nodes, as a process that a test may interrupt or kill: ``playing.py SCENARIO.toml OUT``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import trio

from farandole.protocol.run.manifest import Manifest
from farandole.testnet.play.launch import Testnet, write_report
from farandole.testnet.play.report import Merged
from farandole.testnet.play.scenario import Scenario, load_scenario

FAKE_NODE = (sys.executable, str(Path(__file__).with_name("fake_node.py")))


def silent(text: str) -> None:
    """Say nothing."""


def measure(manifest: Manifest, run_id: bytes, checkpoints: Sequence[Path], data: Sequence[str]) -> Merged:
    return Merged(loss_start=5.5, loss_merged=2.5, spread=0.01)


def testnet(scenario: Scenario, out: Path, *faults: str) -> Testnet:
    return Testnet(scenario, out, silent, command=[*FAKE_NODE, *faults], measure=measure)


testnet.__test__ = False  # type: ignore[attr-defined]

if __name__ == "__main__":
    out = Path(sys.argv[2])
    write_report(trio.run(testnet(load_scenario(sys.argv[1]), out).play), out)
