from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from farandole.testnet.natlab.groups import Leash
from farandole.testnet.play.launch import summary
from farandole.testnet.play.process import NodeProcess
from farandole.testnet.play.record import NodeRecord
from farandole.testnet.play.report import NodeReport
from farandole.testnet.play.scenario import parse_scenario

from .test_record import status

SCENARIO = parse_scenario({"run": {"name": "demo", "model": "tiny"}, "nodes": 4, "rounds": 9})


def node(index: int, *, is_running: bool = True, **fields: Any) -> NodeProcess:
    record = NodeRecord(NodeReport(index, f"12D3KooW{index:08d}"))
    if fields:
        record.observe(status(**fields), 0.0)
    process = NodeProcess(record, Path(), (), Leash(io.BytesIO()), lambda text: None)
    process.is_running = is_running
    return process


NODES = [
    node(0, round=3, loss=2.5, exchanges_ok=3, partners={"bob": 3}, losses=[(0, 5.0), (1, 4.0)], tokens_per_second=900),
    node(1, round=2, loss=2.75, exchanges_ok=1, exchanges_alone=1, partners={"a": 1}, tokens_per_second=600),
    node(2),
    node(3, is_running=False),
]


def test_the_summary_counts_live_nodes_and_each_exchange_once() -> None:
    expected = "3 live, rounds 2 to 3 of 9, loss 2.500 to 2.750, 2 exchanges, 1.50 k tokens/s"
    assert summary(NODES, SCENARIO) == expected
    assert summary([node(0)], SCENARIO) == "1 nodes start"
