"""Weights of a model in stages: where a node gets them, which it gives, and its copy of another stage's."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import trio
import trio.testing

from farandole.node.base.errors import JoinError
from farandole.node.base.settings import NodeSettings
from farandole.node.base.streams import DIAL_TIMEOUT
from farandole.node.join import bootstrap as joining
from farandole.node.join import comparing, downloads
from farandole.node.join.downloads import Downloads
from farandole.node.join.giving import FRESH_SAVE_TIMEOUT, PASS_OVER_SECONDS, SLOW_COPY_INTERVAL, CopyKeeper, Giving
from farandole.node.join.weights import (
    CONTACT_INTERVAL,
    CONTACT_TIMEOUT,
    DISPUTED_AFTER,
    MAX_ASKED,
    SEED_AFTER,
    WEIGHTS_RETRY,
    WEIGHTS_TIMEOUT,
    Weights,
)
from farandole.node.status.journal import Journal
from farandole.node.store import weight_files
from farandole.node.store.fetch import Fetched, FetchError
from farandole.node.store.holdings import Holding
from farandole.node.store.partial_file import partial_path
from farandole.node.store.provider import (
    ANSWER_TIMEOUT,
    MAX_FRESH_SAVE,
    Conditions,
    DonorBusyError,
    DonorError,
    fresh_save_timeout,
)
from farandole.node.store.weight_files import WeightFiles
from farandole.protocol import sketches
from farandole.protocol import trainer_messages as messages
from farandole.protocol.believing import Credit
from farandole.protocol.block_transfer import BlockQuestion
from farandole.protocol.blocks import Index, SignedIndex, sign_index
from farandole.protocol.copies import ranked
from farandole.protocol.entries import RULES, CheckpointNotice, Kind
from farandole.protocol.manifest import Manifest, ModelConfig
from farandole.protocol.records import checkpoint_key, shard_key
from farandole.protocol.safetensors import encode_header

from ...training.test_sketch import sketch_of
from ..store.files import KEY, RUN, checkpoint_bytes, index_of

MODEL = ModelConfig(num_layers=3, width=16, num_heads=2, hidden=32, context=16, vocabulary=256, num_stages=3)
ME, ANN, BOB, CYD, DAN, EVE = (bytes([number]) * 32 for number in range(6))


def content_of(peer: bytes, stage: int, round_index: int) -> bytes:
    return checkpoint_bytes(8, seed=hash((peer, stage, round_index)), round_index=round_index)


class World:
    """A membership, and peers with checkpoints of stages: (peer, stage) -> (author, round)."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_stages = 3
        self.stage = 1
        self.round = 30
        self.by_peer: dict[tuple[bytes, int], tuple[bytes, int]] = {}
        self.members: dict[bytes, int] = {}
        """Live members -> stage; all are in this run's round."""
        self.silent: set[bytes] = set()
        """Members that do not answer."""
        self.busy: set[bytes] = set()
        self.in_dht: dict[bytes, list[bytes]] = {}
        """Key -> its providers."""
        self.weights_of: dict[bytes, bytes] = {}
        """Peer -> its file, for members that answer questions for sketches."""
        self.compared_with: list[bytes] = []
        self.asked: list[tuple[bytes, int]] = []
        self.fetched_from: list[tuple[bytes, ...]] = []
        self.told: list[tuple[int, int, bool]] = []
        self.provided: list[bytes] = []
        self.seconds = 1.0
        """Duration of a download."""
        self.said: list[str] = []
        self.journal = Journal(say=self.said.append)
        self.announcer = self
        self.credit = Credit()
        self.settings = NodeSettings(home=folder, backup_seconds=10.0)
        self.settings.checkpoints.mkdir()
        self.weights = self.begin()
        monkeypatch.setattr(comparing, "ask_for_sketch", self.sketch)
        monkeypatch.setattr(downloads, "ask_for_index", self.ask)
        monkeypatch.setattr(downloads, "fetch_checkpoint", self.fetch)
        monkeypatch.setattr(joining, "dial", self.dial)
        monkeypatch.setattr(trio.to_thread, "run_sync", run_here)

    def begin(self) -> Weights:
        """Begin a new life of the node."""
        host: Any = SimpleNamespace(
            author=ME, find_providers=self.find_providers, provide=self.provide, withdraw=self.provided.remove
        )
        me: Any = self
        files = WeightFiles(self.settings, Manifest("cut", MODEL))
        return Weights(KEY, Downloads(host, Conditions(host, RUN), files, me, self.journal))

    def index(self, peer: bytes, stage: int) -> Index:
        author, round_index = self.by_peer[peer, stage]
        index = index_of(self.content_of(author, stage, round_index), round_index)
        maker = author if author in self.weights_of else index.author
        return msgspec.structs.replace(index, stage=stage, num_stages=3, author=maker)

    def content_of(self, author: bytes, stage: int, round_index: int) -> bytes:
        return self.weights_of.get(author) or content_of(author, stage, round_index)

    # The part of a membership that weights use

    def current_round(self) -> int:
        return self.round

    @property
    def everyone(self) -> frozenset[bytes]:
        return frozenset(self.members)

    def networks(self) -> dict[bytes, str]:
        return {}

    def awaits_contact(self) -> bool:
        return False

    def is_beginning(self) -> bool:
        return False

    def doubt_those_ahead(self, after_round: int) -> None:
        self.credit.lose((peer for peer in self.members if self.round > after_round), trio.current_time())

    def nodes_of_stages(self) -> tuple[frozenset[bytes], ...]:
        return tuple(frozenset(peer for peer, held in self.members.items() if held == stage) for stage in range(3))

    def donors(self, after_round: int, stage: int) -> list[bytes]:
        now = trio.current_time()
        ahead = [peer for peer, held in self.members.items() if held == stage and self.round > after_round]
        return [peer for peer in ahead if self.credit.is_good(peer, now)]

    def announced(self, stage: int) -> dict[bytes, CheckpointNotice]:
        return {peer: found[0] for peer, found in self.notices(stage).items() if self.members[peer] == stage}

    def notices(self, stage: int) -> dict[bytes, list[CheckpointNotice]]:
        return {
            peer: [CheckpointNotice(told[1], of, sign_index(KEY, self.index(peer, of)).id, 1, 1, 1)]
            for (peer, of), told in self.by_peer.items()
            if of == stage and peer in self.members
        }

    def holders(self, stage: int, checkpoint_id: bytes) -> list[bytes]:
        return [peer for peer, notices in self.notices(stage).items() if notices[0].id == checkpoint_id]

    def told_checkpoints(self) -> frozenset[bytes]:
        return frozenset()

    def checkpoint_held(self, checkpoint_id: bytes, index: Index, *, is_copy: bool) -> None:
        self.told.append((index.stage, index.round, is_copy))

    # The part of a network that weights use

    async def find_providers(self, key: bytes, timeout: float) -> list[tuple[bytes, list[str]]]:
        await trio.lowlevel.checkpoint()
        return [(peer, []) for peer in self.in_dht.get(key, [])]

    async def provide(self, key: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.provided.append(key)

    async def sketch(self, host: object, member: bytes, question: sketches.SketchQuestion) -> sketches.Sketch | None:
        """Return a member's answer, by `sketch_of`; None if it does not answer."""
        await trio.lowlevel.checkpoint()
        self.compared_with.append(member)
        content = self.weights_of.get(member)
        return None if content is None else sketches.values_of(sketch_of(content, question.seed))

    async def dial(self, host: object, peers: dict[bytes, list[str]]) -> dict[bytes, str]:
        await trio.lowlevel.checkpoint()
        return {}

    async def ask(
        self, conditions: object, peer: bytes, stage: int, max_size: int, known: bytes | None
    ) -> tuple[SignedIndex, Index]:
        await trio.lowlevel.checkpoint()
        self.asked.append((peer, stage))
        if (peer, stage) not in self.by_peer or peer in self.silent:
            raise DonorError("it does not have the checkpoint")
        if peer in self.busy:
            raise DonorBusyError(1.0)
        index = self.index(peer, stage)
        signed = sign_index(KEY, index)
        assert known in (None, signed.id)
        return signed, index

    async def fetch(
        self,
        conditions: object,
        signed: SignedIndex,
        index: Index,
        donors: Callable[[], Collection[bytes]],
        wanted: object,
        path: Path,
        show: object,
        accuse: object,
        *,
        is_prefix: bool,
    ) -> Fetched:
        await trio.sleep(self.seconds)
        names = tuple(donors())
        if names:
            author, round_index = self.by_peer[names[0], index.stage]
            path.write_bytes(self.content_of(author, index.stage, round_index))
        else:
            partial_path(path, signed.id).replace(path)
        assert is_prefix is (path.suffix == ".blocks")
        self.fetched_from.append(names)
        return Fetched(dict.fromkeys(names, 1), 1, 1, 0)

    def is_fetched(self, author: bytes, stage: int, round_index: int) -> bool:
        path = self.settings.fetched(stage)
        return path.exists() and path.read_bytes() == self.content_of(author, stage, round_index)

    def two_to_copy(self) -> list[bytes]:
        """Return members of the next stage with checkpoints, in the order in which they must be copied."""
        self.members = {ANN: 2, BOB: 2}
        self.by_peer = {(ANN, 2): (ANN, 29), (BOB, 2): (BOB, 28)}
        return ranked(RUN, 2, [ANN, BOB])

    async def given(self, weights: Weights, stage: int) -> Holding | None:
        return await weights.giving.find(BlockQuestion(RUN, stage))


async def run_here(function: Any, *args: object) -> object:
    """Run in this thread: the mock clock would jump while a thread works."""
    await trio.lowlevel.checkpoint()
    return function(*args)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


async def test_weights_come_from_the_stages_members_and_each_stage_has_its_file(
    world: World, autojump_clock: trio.testing.MockClock
) -> None:
    world.members = {ANN: 1, BOB: 0}
    world.by_peer = {(ANN, 1): (ANN, 29), (BOB, 1): (BOB, 20)}
    await world.weights.obtain()
    assert world.asked == [(ANN, 1)]
    assert world.is_fetched(ANN, 1, 29)
    assert world.settings.fetched(None).name == "fetched.safetensors"


async def test_a_checkpoint_that_two_hold_comes_from_both_unless_there_are_newer_ones(
    world: World, autojump_clock: trio.testing.MockClock
) -> None:
    world.members = {ANN: 1, BOB: 0, CYD: 1}
    world.by_peer = {(CYD, 1): (CYD, 28), (ANN, 1): (ANN, 27), (BOB, 1): (ANN, 27)}
    await world.weights.obtain()
    assert world.is_fetched(ANN, 1, 27)
    assert set(world.fetched_from[-1]) == {ANN, BOB}
    assert "weights of stage 1, of round 27 from" in "\n".join(world.said)
    world.settings.fetched(1).unlink()
    world.by_peer |= {(CYD, 1): (CYD, 33), (DAN, 1): (DAN, 34), (EVE, 1): (EVE, 33)}
    world.members = {CYD: 1, DAN: 1, EVE: 1, ANN: 1, BOB: 0}
    await world.begin().obtain()
    assert world.is_fetched(CYD, 1, 33)


async def test_a_download_that_was_begun_is_ended_though_there_are_newer_checkpoints(
    world: World, autojump_clock: trio.testing.MockClock
) -> None:
    world.members = {ANN: 1, BOB: 1, CYD: 1}
    world.by_peer = {(ANN, 1): (ANN, 29), (BOB, 1): (ANN, 29), (CYD, 1): (CYD, 25)}
    begun = sign_index(KEY, world.index(CYD, 1)).id
    partial_path(world.settings.fetched(1), begun).touch()
    await world.weights.obtain()
    assert world.is_fetched(CYD, 1, 25)


async def test_where_no_member_gives_weights_a_copy_does(world: World, autojump_clock: trio.testing.MockClock) -> None:
    world.members = {ANN: 1, BOB: 0, CYD: 2}
    world.by_peer = {(BOB, 1): (DAN, 20), (CYD, 1): (DAN, 25)}
    await world.weights.obtain()
    assert world.asked == [(ANN, 1), (CYD, 1)]
    assert world.is_fetched(DAN, 1, 25)


async def test_whom_the_run_state_does_not_know_the_dht_may(
    world: World, autojump_clock: trio.testing.MockClock
) -> None:
    world.in_dht = {shard_key(RUN, 1): [ANN]}
    world.by_peer = {(ANN, 1): (ANN, 20)}
    await world.weights.obtain()
    assert world.is_fetched(ANN, 1, 20)


async def test_who_holds_the_checkpoint_of_a_single_donor_is_asked_of_the_dht(
    world: World, autojump_clock: trio.testing.MockClock
) -> None:
    world.members = {ANN: 1}
    world.by_peer = {(ANN, 1): (ANN, 27)}
    world.in_dht = {checkpoint_key(RUN, sign_index(KEY, world.index(ANN, 1)).id): [ME, CYD, DAN]}
    await world.weights.obtain()
    assert world.fetched_from == [(ANN, CYD, DAN)]


async def test_where_the_run_state_knows_of_donors_enough_the_dht_is_not_asked(
    world: World, autojump_clock: trio.testing.MockClock
) -> None:
    world.members = {ANN: 1, CYD: 1}
    world.by_peer = {(ANN, 1): (ANN, 27), (CYD, 1): (ANN, 27)}
    world.in_dht = {checkpoint_key(RUN, sign_index(KEY, world.index(ANN, 1)).id): [DAN]}
    await world.weights.obtain()
    assert [set(names) for names in world.fetched_from] == [{ANN, CYD}]


async def test_a_stage_that_nobody_has_begins_from_the_seed_with_a_loud_warning(
    world: World, autojump_clock: trio.testing.MockClock
) -> None:
    world.members = {BOB: 0}
    began_at = trio.current_time()
    await world.weights.obtain()
    assert SEED_AFTER <= trio.current_time() - began_at <= SEED_AFTER + 5
    assert "NOBODY HAS THE WEIGHTS OF STAGE 1" in world.journal.warnings[-1]
    assert await world.weights.fetch_ahead(1)


async def test_a_stage_whose_members_have_weights_does_not_begin_from_the_seed(
    world: World, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.members = {ANN: 1}
    notice = CheckpointNotice(0, 1, bytes(32), 1, 1, 1)
    monkeypatch.setattr(world, "notices", lambda stage: {ANN: [notice]})
    with pytest.raises(JoinError, match="step 4"):
        await world.weights.obtain()
    assert not await world.weights.fetch_ahead(1)


async def test_the_next_stages_newest_weights_are_kept_told_and_given(
    nursery: trio.Nursery, world: World, autojump_clock: trio.testing.MockClock
) -> None:
    world.members = {ANN: 2, BOB: 0}
    world.by_peer = {(ANN, 2): (ANN, 29)}
    nursery.start_soon(world.weights.run)
    await trio.sleep(30)
    assert world.asked == [(ANN, 2)]
    assert world.told == [(2, 29, True)]
    assert len(world.provided) == 1
    given = await world.given(world.weights, 2)
    assert given is not None
    assert given.read(0) == content_of(ANN, 2, 29)
    assert await world.given(world.weights, 0) is None
    world.stage = 2  # it moves: its own copy is what it needs
    world.members = {BOB: 0}
    await world.weights.obtain()
    assert world.is_fetched(ANN, 2, 29)
    world.by_peer = {(BOB, 0): (BOB, 31)}
    await trio.sleep(30)
    assert {path.name[:6] for path in world.settings.checkpoints.iterdir()} == {"copy-0"}
    assert len(world.provided) == 1
    nursery.cancel_scope.cancel()


async def test_where_the_one_to_be_copied_does_not_answer_another_is_copied(
    nursery: trio.Nursery, world: World, autojump_clock: trio.testing.MockClock
) -> None:
    first, second = world.two_to_copy()
    world.silent = {first}
    nursery.start_soon(world.weights.run)
    await trio.sleep(60)
    assert world.asked == [(first, 2), (second, 2)]
    assert world.fetched_from == [(second,)]
    world.silent = set()
    await trio.sleep(PASS_OVER_SECONDS)
    assert world.fetched_from == [(second,), (first,)]
    nursery.cancel_scope.cancel()


async def test_one_that_is_busy_is_copied_as_soon_as_it_is_not(
    nursery: trio.Nursery, world: World, autojump_clock: trio.testing.MockClock
) -> None:
    first, _ = world.two_to_copy()
    world.busy = {first}
    nursery.start_soon(world.weights.run)
    await trio.sleep(30)
    assert set(world.asked) == {(first, 2)}
    world.busy = set()
    await trio.sleep(30)
    assert world.fetched_from == [(first,)]
    nursery.cancel_scope.cancel()


async def test_a_copy_outlives_its_node(
    nursery: trio.Nursery, world: World, autojump_clock: trio.testing.MockClock
) -> None:
    world.members, world.by_peer = {ANN: 2}, {(ANN, 2): (ANN, 29)}
    nursery.start_soon(world.weights.run)
    await trio.sleep(15)
    world.members = {}
    world.told.clear()
    again = world.begin()
    nursery.start_soon(again.run)
    await trio.sleep(1)
    assert world.told == [(2, 29, True)]
    given = await world.given(again, 2)
    assert given is not None
    assert given.read(0) == content_of(ANN, 2, 29)
    nursery.cancel_scope.cancel()


async def test_a_copy_makes_room_for_text_that_was_tokenised_meanwhile(
    nursery: trio.Nursery, world: World, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.settings = replace(world.settings, disk=100.0)
    world.members, world.by_peer = {ANN: 2}, {(ANN, 2): (ANN, 29)}
    weights = world.begin()
    nursery.start_soon(weights.run)
    await trio.sleep(15)
    assert await world.given(weights, 2) is not None
    monkeypatch.setattr(weight_files, "used_bytes", lambda folder: 100 * 10**9)
    await trio.sleep(15)
    assert await world.given(weights, 2) is None
    assert list(world.settings.checkpoints.iterdir()) == []
    nursery.cancel_scope.cancel()


async def test_copies_take_a_tenth_of_the_time_at_most(
    nursery: trio.Nursery, world: World, autojump_clock: trio.testing.MockClock
) -> None:
    world.members = {ANN: 2}
    world.seconds = 100.0
    nursery.start_soon(world.weights.run)
    for round_index in range(160):  # a newer one each time
        world.by_peer = {(ANN, 2): (ANN, round_index)}
        await trio.sleep(50)
    assert 5 <= len(world.fetched_from) <= 12
    nursery.cancel_scope.cancel()


async def test_what_a_trainer_of_the_stage_before_saves_is_not_taken_for_this_stages(
    nursery: trio.Nursery, world: World, autojump_clock: trio.testing.MockClock
) -> None:
    content = content_of(ME, 1, 30)
    path = world.settings.checkpoints / "stage-1-round-30.safetensors"
    path.write_bytes(content)
    saved = messages.Saved(30, 1, 1, str(path), len(content), index_of(content).hashes)
    nursery.start_soon(world.weights.run)
    world.weights.giving.trainer_stage = 0
    world.weights.giving.note_saved(saved)
    await trio.sleep(1)
    assert world.told == []
    world.weights.giving.trainer_stage = 1
    world.weights.giving.note_saved(saved)
    await trio.sleep(1)
    assert world.told == [(1, 30, False)]
    path.unlink()  # the trainer keeps two
    given = await world.given(world.weights, 1)
    assert given is not None
    assert given.read(0) == content
    assert await world.weights.giving.find(BlockQuestion(RUN, 1, given.id)) is given
    assert await world.weights.giving.find(BlockQuestion(RUN, 1, bytes(32))) is None
    nursery.cancel_scope.cancel()


async def test_copies_that_break_off_leave_one_beginning_and_not_one_each(
    nursery: trio.Nursery, world: World, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Path] = []

    async def break_off(
        conditions: object,
        signed: SignedIndex,
        index: Index,
        donors: object,
        wanted: object,
        path: Path,
        *args: object,
        is_prefix: bool,
    ) -> Fetched:
        await trio.lowlevel.checkpoint()
        begun.append(partial_path(path, signed.id))
        begun[-1].touch()
        raise FetchError("the line is too slow")

    monkeypatch.setattr(downloads, "fetch_checkpoint", break_off)
    world.members = {ANN: 2}
    nursery.start_soon(world.weights.run)
    for round_index in range(5):
        world.by_peer = {(ANN, 2): (ANN, round_index)}
        await trio.sleep(30)
    assert len(set(begun)) == 5
    assert list(world.settings.checkpoints.iterdir()) == [begun[-1]]
    nursery.cancel_scope.cancel()


async def test_a_checkpoint_whose_file_is_another_already_is_not_given(
    nursery: trio.Nursery, world: World, autojump_clock: trio.testing.MockClock
) -> None:
    content = content_of(ME, 1, 30)
    path = world.settings.checkpoints / "stage-1-round-30.safetensors"
    path.write_bytes(content_of(ME, 1, 31))  # saved again in the same round
    nursery.start_soon(world.weights.run)
    world.weights.giving.trainer_stage = 1
    world.weights.giving.note_saved(messages.Saved(30, 1, 1, str(path), len(content), index_of(content).hashes))
    await trio.sleep(1)
    assert world.told == []
    assert list(world.settings.checkpoints.iterdir()) == [path]
    nursery.cancel_scope.cancel()


async def test_within_a_limit_of_the_disk_there_is_no_room_for_the_stages_that_a_node_has_left(
    world: World, autojump_clock: trio.testing.MockClock
) -> None:
    world.round = 7
    world.settings = replace(world.settings, disk=1.0)
    for name in ("stage-0-round-7", "stage-1-round-7", "stage-2-round-7"):
        (world.settings.checkpoints / f"{name}.safetensors").write_bytes(content_of(ME, 1, 7))
    await world.begin().obtain()
    assert [path.stem for path in world.settings.checkpoints.iterdir()] == ["stage-1-round-7"]


async def test_what_is_held_is_told_again_before_the_run_forgets_it(
    nursery: trio.Nursery, world: World, autojump_clock: trio.testing.MockClock
) -> None:
    world.members, world.by_peer = {ANN: 2}, {(ANN, 2): (ANN, 29)}
    nursery.start_soon(world.weights.run)
    await trio.sleep(30)
    world.members = {}  # the stage's only copy is this node's
    await trio.sleep(RULES[Kind.CHECKPOINT].ttl / 2)
    assert len(world.told) >= 2
    assert set(world.told) == {(2, 29, True)}
    nursery.cancel_scope.cancel()


async def test_many_members_that_do_not_answer_do_not_keep_a_newcomer_for_hours(
    world: World, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_answer(*args: object) -> tuple[SignedIndex, Index]:
        await trio.sleep(DIAL_TIMEOUT)
        raise DonorError("no answer")

    notice = CheckpointNotice(0, 1, bytes(32), 1, 1, 1)
    monkeypatch.setattr(downloads, "ask_for_index", no_answer)
    monkeypatch.setattr(world, "notices", lambda stage: {ANN: [notice]})  # so that it does not begin from the seed
    world.members = {bytes([1, number]) * 16: 1 for number in range(200)}
    began_at = trio.current_time()
    with pytest.raises(JoinError, match="step 4"):
        await world.weights.obtain()
    assert trio.current_time() - began_at <= WEIGHTS_TIMEOUT + MAX_ASKED * DIAL_TIMEOUT + WEIGHTS_RETRY


def refuse(world: World) -> None:
    """Do what the trainer does with a file that it judges unfit."""
    world.settings.fetched(1).unlink()


async def test_the_author_of_unfit_weights_is_not_believed_and_another_is_asked(
    world: World, autojump_clock: trio.testing.MockClock
) -> None:
    world.members = {ANN: 1, BOB: 1}
    world.by_peer = {(ANN, 1): (ANN, 29), (BOB, 1): (BOB, 28)}
    await world.weights.obtain()
    assert world.is_fetched(ANN, 1, 29)
    refuse(world)
    await world.weights.obtain()
    assert "the weights of round 29 are unfit" in "\n".join(world.said)
    assert not world.credit.is_good(world.index(ANN, 1).author, trio.current_time())
    assert world.is_fetched(BOB, 1, 28)


async def test_a_newcomer_whose_members_fall_silent_while_it_judges_waits_for_them(
    world: World, autojump_clock: trio.testing.MockClock
) -> None:
    members = world.members = {ANN: 1, BOB: 1}
    world.by_peer = {(ANN, 1): (ANN, 29), (BOB, 1): (BOB, 28)}
    await world.weights.obtain()
    refuse(world)
    world.members, world.round = {}, 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.weights.obtain)
        await trio.sleep(5.0)
        world.members, world.round = members, 30
    assert world.is_fetched(BOB, 1, 28)


async def test_a_newcomer_whose_members_never_come_back_begins_anew(
    world: World, autojump_clock: trio.testing.MockClock
) -> None:
    world.members, world.by_peer = {ANN: 1}, {(ANN, 1): (ANN, 29)}
    await world.weights.obtain()
    refuse(world)
    world.members, world.round = {}, 0
    began_at = trio.current_time()
    await world.weights.obtain()
    assert trio.current_time() - began_at <= CONTACT_TIMEOUT + CONTACT_INTERVAL
    assert not world.settings.fetched(1).exists()


async def test_weights_that_were_taken_up_cost_nobody_its_credit(
    world: World, autojump_clock: trio.testing.MockClock
) -> None:
    world.members = {ANN: 1}
    world.by_peer = {(ANN, 1): (ANN, 29)}
    await world.weights.obtain()
    world.settings.fetched(1).replace(world.settings.checkpoints / "stage-1-round-29.safetensors")
    await world.weights.obtain()
    assert world.credit.is_good(world.index(ANN, 1).author, trio.current_time())


async def test_who_claims_to_be_ahead_and_gives_nothing_is_not_believed_a_second_time(
    world: World, autojump_clock: trio.testing.MockClock
) -> None:
    own = world.settings.checkpoints / "stage-1-round-5.safetensors"
    own.write_bytes(content_of(ME, 1, 5))
    world.members = {ANN: 1, BOB: 1}
    world.silent = {ANN, BOB}
    await world.weights.obtain()
    assert "going on with this node's own of round 5" in world.journal.warnings[-1]
    assert not world.credit.is_good(ANN, trio.current_time())
    assert world.donors(0, 1) == []


async def test_a_file_of_another_round_than_its_index_says_is_not_taken(
    world: World, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.members = {ANN: 1}
    world.by_peer = {(ANN, 1): (ANN, 29)}
    index = world.index
    monkeypatch.setattr(world, "index", lambda peer, stage: msgspec.structs.replace(index(peer, stage), round=28))
    monkeypatch.setattr("farandole.node.join.weights.WEIGHTS_TIMEOUT", 10.0)
    with pytest.raises(JoinError, match="step 4"):
        await world.weights.obtain()
    assert "lied about the round" in "\n".join(world.said)
    assert not world.settings.fetched(1).exists()


# Compared with other members' weights

RNG = np.random.default_rng(1)
LEARNT = RNG.standard_normal(1_000, np.float32)


def honest() -> np.ndarray:
    """Return an honest replica's weights, some percent away from the others'."""
    return LEARNT + np.float32(0.05) * noise()


def noise() -> np.ndarray:
    return RNG.standard_normal(1_000, np.float32)


def file_of(weights: np.ndarray, round_index: int = 29) -> bytes:
    header = encode_header({"round": str(round_index)}, [("slow/w", (1_000,)), ("momentum/w", (1_000,))])
    return header + 2 * weights.astype("<f4").tobytes()


def hold_alike(world: World, poisoned: Collection[bytes], honest_ones: Collection[bytes]) -> None:
    """Add members of stage 1 with weights: the poisoned all have the same noise, and are one round ahead."""
    poison = file_of(noise(), 30)
    for peer in (*poisoned, *honest_ones):
        world.members[peer] = 1
        world.by_peer[peer, 1] = (peer, 29) if peer in honest_ones else (next(iter(poisoned)), 30)
        world.weights_of[peer] = file_of(honest()) if peer in honest_ones else poison


async def test_a_stages_weights_that_are_like_other_members_are_taken(
    world: World, autojump_clock: trio.testing.MockClock
) -> None:
    hold_alike(world, [], [ANN, BOB, CYD])
    await world.weights.obtain()
    (given,) = [peer for peer in (ANN, BOB, CYD) if world.is_fetched(peer, 1, 29)]
    assert set(world.compared_with) == {ANN, BOB, CYD} - {given}
    assert not world.journal.warnings


async def test_a_stages_poison_that_two_hold_is_refused_and_its_author_not_believed(
    world: World, autojump_clock: trio.testing.MockClock
) -> None:
    hold_alike(world, [ANN, BOB], [CYD, DAN])
    await world.weights.obtain()
    assert "from most others' weights" in world.journal.warnings[0]
    assert world.fetched_from[0] == (ANN, BOB), "what two hold comes first"
    assert any(world.is_fetched(peer, 1, 29) for peer in (CYD, DAN))
    assert not world.credit.is_good(ANN, trio.current_time())
    assert world.credit.is_good(CYD, trio.current_time())
    assert ANN not in world.compared_with[:2], "who holds a checkpoint does not judge it"


async def test_a_liar_among_those_that_are_asked_does_not_make_honest_weights_unfit(
    world: World, autojump_clock: trio.testing.MockClock
) -> None:
    hold_alike(world, [], [ANN, BOB, CYD])
    world.weights_of[DAN] = file_of(noise())  # it has announced weights, and does not give them
    world.members[DAN], world.by_peer[DAN, 1], world.silent = 1, (DAN, 20), {DAN}
    await world.weights.obtain()
    assert any(world.is_fetched(peer, 1, 29) for peer in (ANN, BOB, CYD))
    assert all(world.credit.is_good(peer, trio.current_time()) for peer in (ANN, BOB, CYD))


async def test_where_two_disagree_neither_is_doubted_and_one_is_taken_unless_others_come(
    world: World, autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    """A liar can neither discredit an honest member nor keep newcomers out of a run of two."""
    hold_alike(world, [ANN], [BOB])
    began_at = trio.current_time()
    await world.weights.obtain()
    assert trio.current_time() - began_at > DISPUTED_AFTER
    assert len(world.fetched_from) == 3, "each once before that, and one again"
    assert all("the one member that answered" in line for line in world.journal.warnings)
    assert all(world.credit.is_good(peer, trio.current_time()) for peer in (ANN, BOB))
    assert sum((world.is_fetched(ANN, 1, 30), world.is_fetched(BOB, 1, 29))) == 1
    world.settings.fetched(1).unlink()

    async def come() -> None:
        await trio.sleep(DISPUTED_AFTER / 2)
        hold_alike(world, [], [CYD, DAN])

    nursery.start_soon(come)
    await world.begin().obtain()
    assert any(world.is_fetched(peer, 1, 29) for peer in (BOB, CYD, DAN))


async def test_where_no_member_answers_weights_are_taken_with_a_warning(
    world: World, autojump_clock: trio.testing.MockClock
) -> None:
    hold_alike(world, [ANN], [])
    await world.weights.obtain()
    assert world.is_fetched(ANN, 1, 30)
    assert "not compared with another member's: there is none" in world.journal.warnings[-1]
    world.settings.fetched(1).unlink()
    world.members[BOB], world.by_peer[BOB, 1] = 1, (BOB, 20)
    await world.begin().obtain()
    assert "none of 1 members answered" in world.journal.warnings[-1]


async def test_a_newcomer_does_not_wait_long_for_members_that_say_nothing(
    world: World, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_alike(world, [], [ANN, BOB])

    async def never(*args: object) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(comparing, "ask_for_sketch", never)
    began_at = trio.current_time()
    await world.weights.obtain()
    assert trio.current_time() - began_at < comparing.ANSWER_TIMEOUT + 2


async def test_a_stage_to_which_a_node_would_move_is_compared_too(
    world: World, autojump_clock: trio.testing.MockClock
) -> None:
    hold_alike(world, [ANN], [BOB, CYD])
    world.stage = 0
    assert await world.weights.fetch_ahead(1)
    assert any(world.is_fetched(peer, 1, 29) for peer in (BOB, CYD))


async def test_what_was_not_compared_yet_when_a_node_ends_is_not_used_in_its_next_life(
    world: World, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_alike(world, [ANN], [BOB, CYD])

    async def never(*args: object) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(comparing, "ask_for_sketch", never)
    with trio.move_on_after(5.0):
        await world.weights.obtain()
    assert len(world.fetched_from) == 1
    assert not world.settings.fetched(1).exists()


class GivingLarge:
    """A node whose checkpoints are large, and which holds an old one."""

    def __init__(self, max_bytes: int, rate: float | None) -> None:
        held: Any = SimpleNamespace(index=SimpleNamespace(round=1, stage=0))
        held.hold = lambda: held
        library: Any = SimpleNamespace(newest=held, copy=None, max_bytes=max_bytes)
        membership: Any = SimpleNamespace(stage=0)
        journal = Journal(say=lambda text: None)
        journal.update(round=30)
        self.giving = Giving(library, membership, journal)
        self.giving.save_rate = rate

    async def seconds_until_answered(self) -> float:
        """Return the seconds until it answers; the trainer does not save in time."""
        began_at = trio.current_time()
        assert await self.giving.find(BlockQuestion(RUN, 0)) is not None
        with trio.fail_after(1):
            await self.giving.save_wanted()
        return trio.current_time() - began_at


@pytest.mark.parametrize(
    ("max_bytes", "rate", "seconds"),
    [
        (1_000, None, FRESH_SAVE_TIMEOUT),
        (2_000_000_000, None, FRESH_SAVE_TIMEOUT + 20),
        (2_000_000_000, 500e6, FRESH_SAVE_TIMEOUT + 20),
        (2_000_000_000, 50e6, 0),  # a save takes 40 s: the newcomer gets the existing one
        (10**12, None, FRESH_SAVE_TIMEOUT + MAX_FRESH_SAVE),
        (10**12, 1e9, 0),
    ],
)
async def test_a_save_for_a_newcomer_has_the_time_that_its_size_takes(
    max_bytes: int, rate: float | None, seconds: float, autojump_clock: trio.testing.MockClock
) -> None:
    assert await GivingLarge(max_bytes, rate).seconds_until_answered() == pytest.approx(seconds, abs=0.01)
    assert seconds < ANSWER_TIMEOUT + fresh_save_timeout(max_bytes), "a newcomer waits for longer"


def test_the_rate_of_saves_is_measured() -> None:
    giving = GivingLarge(1_000, None).giving
    giving.note_saved(messages.Saved(7, 70, 700, "path", size=4_000))
    assert giving.save_rate is None
    giving.note_saved(messages.Saved(8, 80, 800, "path", size=4_000, seconds=2.0))
    assert giving.save_rate == 2_000


async def test_a_copy_that_would_be_too_old_when_it_is_here_is_not_made(
    world: World, autojump_clock: trio.testing.MockClock
) -> None:
    """The model is not cut. The line is measured again after a day."""
    whole = Manifest("whole", msgspec.structs.replace(MODEL, num_stages=1))
    files = WeightFiles(world.settings, whole)
    host: Any = SimpleNamespace(author=ME)
    membership: Any = world
    line = Downloads(host, Conditions(host, RUN), files, membership, world.journal)
    library: Any = SimpleNamespace()
    keeper = CopyKeeper(line, library)
    too_slow = files.required_bytes(0) / (6 * whole.rounds.round_seconds)

    assert not keeper._is_in_vain(0)  # nothing is measured
    line.is_measured, line.rate = True, 2 * too_slow
    assert not keeper._is_in_vain(0)
    line.rate = too_slow
    assert keeper._is_in_vain(0)
    assert "would be 6 rounds old" in world.journal.events[-1].text
    await trio.sleep(SLOW_COPY_INTERVAL)
    assert not keeper._is_in_vain(0)  # once, to measure it
    assert keeper._is_in_vain(0)


async def test_a_copy_of_a_stage_is_made_however_old_it_will_be(world: World) -> None:
    keeper = world.weights._copies
    world.weights._downloads.is_measured, world.weights._downloads.rate = True, 1e-3
    assert not keeper._is_in_vain(2)
