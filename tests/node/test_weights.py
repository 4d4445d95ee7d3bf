"""Where a node of a model in stages gets weights from, gives them, and keeps a copy of another stage's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from farandole.node import trainer_messages as messages
from farandole.node import weights as weights_module
from farandole.node.board import Board
from farandole.node.joining import JoinError
from farandole.node.settings import NodeSettings
from farandole.node.shaping import Shaping
from farandole.node.transfers import TransferError
from farandole.node.weights import SEED_AFTER, Weights
from farandole.protocol.manifest import Manifest, ModelConfig
from farandole.protocol.transfers import CheckpointHeader

MODEL = ModelConfig(num_layers=3, width=16, num_heads=2, hidden=32, context=16, vocabulary=256, num_stages=3)
ANN, BOB, CYD = (bytes([number]) * 32 for number in range(1, 4))


class World:
    """A membership, and peers with checkpoints of stages: (peer, stage) -> round."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_stages = 3
        self.stage = 1
        self.round = 30
        self.by_peer: dict[tuple[bytes, int], int] = {}
        self.members: dict[bytes, int] = {}
        """Live members -> stage, all of this run's round."""
        self.in_dht: list[bytes] = []
        self.asked: list[tuple[bytes, int]] = []
        self.told: list[tuple[int, int, bool]] = []
        self.board = Board(say=lambda text: None)
        self.settings = NodeSettings(home=folder, backup_seconds=10.0)
        self.facts: dict[str, bytes] = {}
        self.weights = self.begin()
        monkeypatch.setattr(weights_module, "fetch_checkpoint", self.fetch)
        monkeypatch.setattr(weights_module, "dial", self.dial)
        monkeypatch.setattr(trio.to_thread, "run_sync", run_here)

    def begin(self) -> Weights:
        """A life of the node."""
        host: Any = SimpleNamespace(author=b"m" * 32, find_providers=self.find_providers)
        me: Any = self
        return Weights(
            self.settings, self.board, host, me, Manifest("cut", MODEL), bytes(32), Shaping(), me, lambda: None
        )

    async def put_fact(self, name: str, value: bytes) -> None:
        self.facts[name] = value

    async def get_fact(self, name: str) -> bytes | None:
        return self.facts.get(name)

    def current_round(self) -> int:
        return self.round

    def donors(self, after_round: int, stage: int) -> list[bytes]:
        return [peer for peer, held in self.members.items() if held == stage and self.round > after_round]

    def savers(self, stage: int, after_round: int = -1) -> list[bytes]:
        return [peer for peer in self.donors(after_round, stage) if (peer, stage) in self.by_peer]

    def backup_holders(self, stage: int, after_round: int) -> list[bytes]:
        found = {peer: told for (peer, of), told in self.by_peer.items() if of == stage and told > after_round}
        return sorted((peer for peer in found if self.members.get(peer, stage) != stage), key=lambda peer: -found[peer])

    def checkpoint_saved(self, stage: int, header: CheckpointHeader, *, is_backup: bool = False) -> None:
        self.told.append((stage, header.round, is_backup))

    async def find_providers(self, key: bytes, timeout: float) -> list[tuple[bytes, list[str]]]:
        await trio.lowlevel.checkpoint()
        return [(peer, []) for peer in self.in_dht]

    async def dial(self, host: object, peers: dict[bytes, list[str]]) -> dict[bytes, str]:
        await trio.lowlevel.checkpoint()
        return {}

    async def fetch(
        self, host: object, peer: bytes, run_id: bytes, path: Path, max_size: int, show: Any, cap: object, stage: int
    ) -> CheckpointHeader:
        self.asked.append((peer, stage))
        await trio.sleep(1.0)
        if (peer, stage) not in self.by_peer:
            raise TransferError("this peer has no checkpoint to give now")
        show(1, 1)
        path.write_bytes(b"%d" % self.by_peer[peer, stage])
        return CheckpointHeader(self.by_peer[peer, stage], 1, 1, 1, b"h" * 32)


async def run_here(function: Any, *args: object) -> object:
    """The clock would jump while a thread works."""
    await trio.lowlevel.checkpoint()
    return function(*args)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


async def test_weights_come_from_the_stages_members_and_each_stage_has_its_file(
    world: World, autojump_clock: trio.testing.MockClock
) -> None:
    world.members = {ANN: 1, BOB: 0}
    world.by_peer = {(ANN, 1): 29, (BOB, 1): 20}
    await world.weights.obtain()
    assert world.asked == [(ANN, 1)]
    assert world.settings.fetched(1).read_bytes() == b"29"
    assert world.settings.fetched(None).name == "fetched.safetensors"


async def test_where_no_member_gives_weights_a_backup_does(
    world: World, autojump_clock: trio.testing.MockClock
) -> None:
    world.members = {ANN: 1, BOB: 0, CYD: 2}
    world.by_peer = {(BOB, 1): 20, (CYD, 1): 25}
    await world.weights.obtain()
    assert world.asked == [(ANN, 1), (CYD, 1)]


async def test_whom_the_run_state_does_not_know_the_dht_may(
    world: World, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.in_dht, world.by_peer = [ANN], {}
    world.by_peer = {(ANN, 1): 20}
    world.members = {ANN: 1}
    monkeypatch.setattr(world, "donors", lambda after_round, stage: [])
    await world.weights.obtain()
    assert world.settings.fetched(1).read_bytes() == b"20"


async def test_a_stage_that_nobody_has_begins_from_the_seed_with_a_loud_warning(
    world: World, autojump_clock: trio.testing.MockClock
) -> None:
    world.members = {BOB: 0}
    began_at = trio.current_time()
    await world.weights.obtain()
    assert SEED_AFTER <= trio.current_time() - began_at <= SEED_AFTER + 5
    assert "NOBODY HAS THE WEIGHTS OF STAGE 1" in world.board.warnings[-1]
    assert await world.weights.fetch_ahead(1)


async def test_a_stage_whose_members_have_weights_does_not_begin_from_the_seed(
    world: World, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.members = {ANN: 1}
    monkeypatch.setattr(world, "savers", lambda stage, after_round=-1: [ANN])
    with pytest.raises(JoinError, match="step 4"):
        await world.weights.obtain()
    assert not await world.weights.fetch_ahead(1)


async def test_the_next_stages_newest_weights_are_kept_told_and_given(
    nursery: trio.Nursery, world: World, autojump_clock: trio.testing.MockClock
) -> None:
    world.members = {ANN: 2, BOB: 0}
    world.by_peer = {(ANN, 2): 29}
    nursery.start_soon(world.weights.keep_backups)
    await trio.sleep(30)
    assert world.asked[0] == (ANN, 2)
    assert world.told[0] == (2, 29, True)
    assert (given := await world.weights.give(2)) is not None
    assert given.path.read_bytes() == b"29"
    assert await world.weights.give(0) is None
    world.stage = 2  # it moves: its own backup is what it needs
    world.members = {BOB: 0}
    await world.weights.obtain()
    assert world.settings.fetched(2).read_bytes() == b"29"
    world.by_peer = {(BOB, 0): 31}
    await trio.sleep(30)
    assert [path.name for path in world.settings.home.glob("backup-*")] == ["backup-0.safetensors"]
    nursery.cancel_scope.cancel()


async def test_a_backup_outlives_its_node(
    nursery: trio.Nursery, world: World, autojump_clock: trio.testing.MockClock
) -> None:
    world.members, world.by_peer = {ANN: 2}, {(ANN, 2): 29}
    nursery.start_soon(world.weights.keep_backups)
    await trio.sleep(15)
    world.members = {}
    world.told.clear()
    again = world.begin()
    nursery.start_soon(again.keep_backups)
    await trio.sleep(1)
    assert world.told == [(2, 29, True)]
    assert (given := await again.give(2)) is not None
    assert given.path.read_bytes() == b"29"
    nursery.cancel_scope.cancel()


async def test_a_backup_takes_a_tenth_of_the_time_at_most(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, world: World, autojump_clock: trio.testing.MockClock
) -> None:
    world.members, world.by_peer = {ANN: 2}, {(ANN, 2): 29}

    async def fetch_slowly(*args: Any) -> CheckpointHeader:
        await trio.sleep(100.0)
        return await world.fetch(*args)

    monkeypatch.setattr(weights_module, "fetch_checkpoint", fetch_slowly)
    nursery.start_soon(world.weights.keep_backups)
    await trio.sleep(8_000)
    assert 5 <= len(world.asked) <= 12
    nursery.cancel_scope.cancel()


async def test_what_a_trainer_of_the_stage_before_saves_is_not_taken_for_this_stages(
    world: World, autojump_clock: trio.testing.MockClock
) -> None:
    saved = messages.Saved(30, 1, 1, "checkpoint", 1, sha256=b"h" * 32)
    world.weights.trainer_stage = 0
    world.weights.note_saved(saved)
    assert world.told == []
    world.weights.trainer_stage = 1
    world.weights.note_saved(saved)
    assert world.told == [(1, 30, False)]
    assert (given := await world.weights.give(1)) is not None
    assert given.path == Path("checkpoint")
