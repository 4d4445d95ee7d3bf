"""Each link between the homes of a testnet, as its two ends have told of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .grid import Grid
from .report import NodeReport

_NONE: Final = "-"


def link_table(nodes: Sequence[NodeReport]) -> Grid:
    """A row and a column for each node: how the one of the row reaches that of the column; "-" if it does not."""
    header = ["link to node", *(str(node.index) for node in nodes)]
    rows = [
        [
            f"{node.index} {node.home}",
            *(node.links.get(other.peer_id, _NONE) if other is not node else "" for other in nodes),
        ]
        for node in nodes
    ]
    return Grid("Links between homes, as the node of the row says", header, rows)
