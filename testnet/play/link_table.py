"""A table of the links between the homes of a testnet, as their two ends report them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..report.section import Grid
from .report import NodeReport

_NONE: Final = "-"


def link_table(nodes: Sequence[NodeReport]) -> Grid:
    """Return a table of links: its cells are the path from the row's node to the column's; "-" if there is none."""
    header = ["link to node", *(str(node.index) for node in nodes)]
    rows = [
        [
            f"{node.index} {node.home}",
            *(node.links.get(other.peer_id, _NONE) if other is not node else "" for other in nodes),
        ]
        for node in nodes
    ]
    return Grid("Links between homes, as the node of the row says", header, rows)
