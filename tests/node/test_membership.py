"""What a node tells of itself can always be told, whatever its training or a peer made of its numbers."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

from farandole.node.board import Board
from farandole.node.membership import Membership
from farandole.protocol.entries import Beat, Kind, Payload
from farandole.protocol.liveness import Liveness


def make_membership(board: Board, gossip: Any, state: Any = None) -> Membership:
    anything: Any = None
    return Membership(
        anything,
        state,
        gossip,
        board,
        random.Random(1),
        incarnation=1,
        on_peers=lambda peers: None,
        on_lost=lambda peer: None,
    )


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
    board = Board(say=lambda text: None)
    board.loss, board.round = loss, 2**40  # a liar's round
    membership = make_membership(board, gossip)
    await membership.beat()
    await membership.report_progress()
    assert gossip.published[0] == (Kind.BEAT, Beat(0, 2**31 - 1, told, 0))
    assert gossip.published[1][1].rounds == 2**31 - 1


class Beats:
    """A run state that holds heartbeats only."""

    def __init__(self, beats: dict[bytes, Beat]) -> None:
        self.beats = beats

    def payload(self, author: bytes, kind: type[Payload]) -> Payload | None:
        return self.beats.get(author) if kind is Beat else None


@pytest.mark.parametrize(
    ("beats", "round_index"),
    [
        ([], 0),
        ([Beat(0, 0, None, 0)], 0),  # a run that begins
        ([Beat(900, 30, None, 0), Beat(0, 0, None, 0), Beat(0, 0, None, 0)], 30),  # newcomers are no median
        ([Beat(0, 30, None, 0), Beat(0, 0, None, 0)], 30),  # a member that has just come back
        ([Beat(50, 0, None, 0), Beat(0, 0, None, 0)], 0),
    ],
)
def test_newcomers_do_not_make_a_run_look_young(beats: list[Beat], round_index: int) -> None:
    told = {bytes([index]): beat for index, beat in enumerate(beats)}
    membership = make_membership(Board(say=lambda text: None), Gossip(), Beats(told))
    membership._others = (frozenset(told),)
    assert membership.current_round() == round_index


async def test_a_device_that_was_found_is_announced() -> None:
    board, gossip = Board(say=lambda text: None), Gossip()
    membership = make_membership(board, gossip)
    host: Any = SimpleNamespace(addresses=["/ip4/10.0.0.1/tcp/1/p2p/x"])
    membership._host = host
    await membership.announce()
    board.device = "CPU (x86_64)"
    assert membership._has_changed()
    await membership.announce()
    assert not membership._has_changed()
    assert [member.device for _, member in gossip.published] == ["", "CPU (x86_64)"]  # type: ignore[attr-defined]
