"""What a node tells of itself can always be told, whatever its training or a peer made of its numbers."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from farandole.node.board import Board
from farandole.node.membership import Membership
from farandole.protocol.entries import Beat, Kind, Payload
from farandole.protocol.liveness import Liveness


class Gossip:
    """Keeps what is published."""

    def __init__(self) -> None:
        self.liveness = Liveness()
        self.published: list[tuple[Kind, Payload]] = []

    async def publish(self, kind: Kind, index: int, payload: Payload) -> None:
        self.published.append((kind, payload))


@pytest.mark.parametrize(
    ("loss", "told"), [(None, None), (2.5, 2_500_000), (math.nan, None), (math.inf, 2**31 - 1), (1e9, 2**31 - 1)]
)
async def test_a_replica_that_diverges_does_not_stop_its_nodes_heart(loss: float | None, told: int | None) -> None:
    gossip: Any = Gossip()
    anything: Any = None
    board = Board(say=lambda text: None)
    board.loss, board.round = loss, 2**40  # a liar's round
    membership = Membership(
        anything,
        anything,
        gossip,
        board,
        random.Random(1),
        incarnation=1,
        on_peers=lambda peers: None,
        on_lost=lambda peer: None,
    )
    await membership.beat()
    await membership.report_progress()
    assert gossip.published[0] == (Kind.BEAT, Beat(0, 2**31 - 1, told, 0))
    assert gossip.published[1][1].rounds == 2**31 - 1
