"""Invented reports of plays."""

from __future__ import annotations

import msgspec

from farandole.testnet.play.report import NodeReport, PlayReport

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


def node(index: int, tokens: int = 1_000, **fields: object) -> NodeReport:
    """Return the report of a node that ran for a hundred seconds."""
    made = NodeReport(index, f"peer {index}", tokens=tokens, given_seconds=100.0, is_alive=True)
    return msgspec.structs.replace(made, **fields)
