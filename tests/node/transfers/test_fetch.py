from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from safetensors.numpy import load, load_file
from trio.testing import MockClock

from farandole.node.base.bandwidth import Shaping
from farandole.node.base.errors import PeerUnreachableError
from farandole.node.base.settings import NodeSettings
from farandole.node.bulk.negotiation import BulkService, open_bulk
from farandole.node.mesh.host import Host
from farandole.node.status.journal import Journal
from farandole.node.status.status import NO_START
from farandole.node.store.consolidated.folder import CHECKPOINT_NAME, INDEX_NAME, Consolidated
from farandole.node.store.consolidated.resume import resumed_manifest
from farandole.node.store.disk_space import Room, WeightFiles, used_bytes
from farandole.node.transfers import giver as giving
from farandole.node.transfers import start as starting
from farandole.node.transfers.block_file import PartialFile, partial_path
from farandole.node.transfers.giver import BlockService, Holding
from farandole.node.transfers.receiver import (
    Conditions,
    Downloads,
    Fetched,
    FetchProgress,
    ask_for_index,
    fetch_checkpoint,
)
from farandole.node.transfers.start import Start
from farandole.protocol.checkpoints import block_transfer as download
from farandole.protocol.checkpoints.block_transfer import BlockQuestion
from farandole.protocol.checkpoints.blocks import BLOCK_BYTES, Index, SignedIndex, decode_signed_index, num_blocks

from ...patience import PATIENCE
from ..hosts import host_at_loopback
from ..store.consolidated.runs import MODELS, manifest_for, pulled
from .files import NOBODY, RUN, ToDonor, checkpoint_bytes, hold, is_required, signed_index_of

CONTENT = checkpoint_bytes(1_500_000)  # 24 MB, of which half is wanted
CONTENT_WANTED = len(CONTENT) / 2
NUM_WANTED = num_blocks(len(CONTENT) // 2)


@dataclass
class Member:
    host: Host
    channels: BulkService
    service: BlockService
    conditions: Conditions
    holding: Holding | None = None

    async def find(self, question: BlockQuestion) -> Holding | None:
        await trio.lowlevel.checkpoint()
        if self.holding is None or question.id not in (None, self.holding.id):
            return None
        return self.holding


@contextlib.asynccontextmanager
async def open_member() -> AsyncIterator[Member]:
    async with host_at_loopback() as host, open_bulk(host, b"r" * 32) as channels:
        conditions = Conditions(host, RUN, channels=channels)
        service = BlockService(replace(conditions), lambda question: member.find(question))
        member = Member(host, channels, service, conditions)
        yield member


@contextlib.asynccontextmanager
async def open_members(count: int) -> AsyncIterator[list[Member]]:
    """Open members of which the first knows the addresses of the others."""
    with trio.fail_after(PATIENCE):
        async with contextlib.AsyncExitStack() as stack:
            members = [await stack.enter_async_context(open_member()) for _ in range(count)]
            for member in members[1:]:
                members[0].host.dialler.add_addresses(member.host.author, member.host.addresses)
            yield members


async def fetch(
    newcomer: Member, donors: list[Member], path: Path, wanted: Callable[[str], bool] = is_required, **options: Any
) -> Fetched:
    """Fetch what is wanted from these members, of which there may be more later."""
    signed, index = signed_index_of(CONTENT)
    return await fetch_checkpoint(
        newcomer.conditions, signed, index, lambda: [donor.host.author for donor in donors], wanted, path, **options
    )


def is_what_was_wanted(path: Path) -> bool:
    whole = load(CONTENT)
    return {name: tensor.tobytes() for name, tensor in load_file(path).items()} == {
        name: whole[name].tobytes() for name in ("slow/w", "momentum/w")
    }


async def test_two_donors_give_different_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "MAX_WINDOW", 2)  # otherwise the first ready donor is asked for all
    async with open_members(3) as (newcomer, *donors):
        newcomer.conditions.shaping = Shaping.of_mbit(0, 100)  # otherwise one has given all before the other is asked
        for number, donor in enumerate(donors):
            await newcomer.host.connect(donor.host.author)
            donor.holding = hold(tmp_path / f"theirs-{number}", CONTENT)
        shown: list[FetchProgress] = []
        fetched = await fetch(newcomer, donors, tmp_path / "ours", on_progress=shown.append)
        assert is_what_was_wanted(tmp_path / "ours")
        assert set(fetched.num_by_donor) == {donor.host.author for donor in donors}
        assert NUM_WANTED <= sum(fetched.num_by_donor.values()) < num_blocks(len(CONTENT))
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith("ours")] == ["ours"]
        assert shown[-1].total >= shown[-1].num_bytes


async def test_to_hash_what_an_earlier_attempt_left_may_take_longer_than_donors_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mock_clock: trio.testing.MockClock
) -> None:
    signed, index = signed_index_of(CONTENT)
    partial_path(tmp_path / "ours", signed.id).write_bytes(CONTENT)
    blocks = PartialFile.blocks

    def blocks_of_a_slow_disk(file: PartialFile) -> set[int]:
        mock_clock.jump(10 * download.PATIENCE)
        return blocks(file)

    monkeypatch.setattr(PartialFile, "blocks", blocks_of_a_slow_disk)
    fetched = await fetch_checkpoint(Conditions(NOBODY, RUN), signed, index, list, is_required, tmp_path / "ours")
    assert fetched.num_bytes == 0
    assert is_what_was_wanted(tmp_path / "ours")


async def test_all_of_a_checkpoint_is_the_same_file_and_a_prefix_can_be_given(tmp_path: Path) -> None:
    async with open_members(3) as (newcomer, donor, third):
        donor.holding = hold(tmp_path / "theirs", CONTENT)
        await fetch(newcomer, [donor], tmp_path / "whole", lambda name: True)
        assert (tmp_path / "whole").read_bytes() == CONTENT
        await fetch(newcomer, [donor], tmp_path / "prefix", is_prefix=True)
        assert (tmp_path / "prefix").read_bytes() == CONTENT[: NUM_WANTED * BLOCK_BYTES]
        third.holding = Holding(tmp_path / "prefix", *signed_index_of(CONTENT))
        assert third.holding.num_held == NUM_WANTED
        await fetch(newcomer, [third], tmp_path / "ours")
        assert is_what_was_wanted(tmp_path / "ours")


async def test_a_fetch_that_was_cut_off_goes_on_where_it_was(tmp_path: Path) -> None:
    async with open_members(2) as (newcomer, donor):
        donor.holding = hold(tmp_path / "theirs", CONTENT)
        with trio.CancelScope() as life:

            def kill_at_half(progress: FetchProgress) -> None:
                if progress.num_bytes > CONTENT_WANTED / 2:
                    life.cancel()

            # Over streams, at a bounded rate, so that there is a middle.
            newcomer.conditions.shaping, newcomer.conditions.channels = Shaping.of_mbit(0, 100), None
            await fetch(newcomer, [donor], tmp_path / "ours", on_progress=kill_at_half)
        assert life.cancelled_caught
        (partial,) = tmp_path.glob("ours.*")
        with partial.open("r+b") as file:  # a block torn by a power cut
            file.write(bytes(100))
        fetched = await fetch(newcomer, [donor], tmp_path / "ours")
        assert sum(fetched.num_by_donor.values()) <= NUM_WANTED - (NUM_WANTED // 2 - 1)
        assert is_what_was_wanted(tmp_path / "ours")


async def test_who_gives_wrong_bytes_is_reported_and_others_give_the_right_ones(tmp_path: Path) -> None:
    async with open_members(3) as (newcomer, liar, donor):
        donor.holding = hold(tmp_path / "theirs", CONTENT)
        (tmp_path / "lies").write_bytes(CONTENT[: 3 * BLOCK_BYTES] + bytes(len(CONTENT) - 3 * BLOCK_BYTES))
        liar.holding = Holding(tmp_path / "lies", *signed_index_of(CONTENT))
        honest, donor.holding = donor.holding, None  # otherwise it may have given all before the liar is asked
        accused: list[bytes] = []

        def accuse(peer: bytes, reason: str) -> None:
            accused.append(peer)
            donors.append(donor)
            donor.holding = honest

        donors = [liar]
        fetched = await fetch(newcomer, donors, tmp_path / "ours", accuse=accuse)
        assert is_what_was_wanted(tmp_path / "ours")
        assert accused == [liar.host.author]
        assert fetched.num_by_donor.get(liar.host.author, 0) <= 3


async def test_the_newest_checkpoint_is_asked_for_by_its_stage(tmp_path: Path) -> None:
    async with open_members(2) as (newcomer, donor):
        max_size = len(CONTENT)
        with pytest.raises(match="does not have"):
            await ask_for_index(newcomer.conditions, donor.host.author, 0, max_size)
        donor.holding = hold(tmp_path / "theirs", CONTENT)
        assert await ask_for_index(newcomer.conditions, donor.host.author, 0, max_size) == signed_index_of(CONTENT)
        with pytest.raises(match="another"):
            await ask_for_index(newcomer.conditions, donor.host.author, 1, max_size)
        with pytest.raises(match="at most"):
            await ask_for_index(newcomer.conditions, donor.host.author, 0, max_size - 1)


async def test_what_nobody_has_any_more_is_given_up_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "PATIENCE", 1_000.0)
    async with open_members(3) as (newcomer, *donors):
        donors[0].holding = hold(tmp_path / "theirs", checkpoint_bytes(1_000))
        with pytest.raises(match="nobody has it any more"):
            await fetch(newcomer, donors, tmp_path / "ours")


async def test_a_download_that_cannot_be_stored_is_said(tmp_path: Path) -> None:
    async with open_members(2) as (newcomer, donor):
        donor.holding = hold(tmp_path / "theirs", CONTENT)
        with pytest.raises(PeerUnreachableError, match="cannot be stored"):
            await fetch(newcomer, [donor], tmp_path / "nowhere" / "ours")


async def test_what_is_more_than_the_owner_allows_is_refused_before_any_weights_move(tmp_path: Path) -> None:
    """The first block has the header, and so the size of the weights."""
    async with open_members(2) as (newcomer, donor):
        donor.holding = hold(tmp_path / "theirs", CONTENT)
        home = tmp_path / "home"
        home.mkdir()
        newcomer.conditions.room = Room(home, limit=round(1.9 * len(CONTENT)))
        (home / "own").write_bytes(bytes(len(CONTENT)))
        with pytest.raises(match="--disk leaves"):
            await fetch(newcomer, [donor], home / "ours")
        assert used_bytes(home) <= len(CONTENT) + 2 * BLOCK_BYTES

        (home / "own").unlink()
        await fetch(newcomer, [donor], home / "ours")
        assert is_what_was_wanted(home / "ours")
        assert used_bytes(home) <= 1.9 * len(CONTENT)


async def test_who_is_too_many_waits_for_a_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(giving, "MAX_SERVED", 1)
    monkeypatch.setattr(giving, "TURN_SECONDS", 0.3)
    monkeypatch.setattr(giving, "TURNED_OUT_SECONDS", 0.3)
    async with open_members(3) as (donor, first, second):
        donor.holding = hold(tmp_path / "theirs", CONTENT)
        ended: list[str] = []
        find, num_turns = donor.find, 0

        async def count_turns(question: BlockQuestion) -> Holding | None:
            nonlocal num_turns
            num_turns += 1
            return await find(question)

        monkeypatch.setattr(donor, "find", count_turns)

        async def take(name: str, newcomer: Member) -> None:
            newcomer.host.dialler.add_addresses(donor.host.author, donor.host.addresses)
            newcomer.conditions = Conditions(newcomer.host, RUN, Shaping.of_mbit(0, 80))
            await fetch(newcomer, [donor], tmp_path / name)
            ended.append(name)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(take, "first", first)
            nursery.start_soon(take, "second", second)
        assert sorted(ended) == ["first", "second"]
        assert num_turns > 2, "who has had a turn makes room for the other"


BOB = b"b" * 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Consolidated:
    return pulled(manifest_for(MODELS["own"]), tmp_path_factory.mktemp("run") / "model")


@pytest.fixture
def journal() -> Journal:
    return Journal(lambda text: None)


def start_at(home: Path, model: Consolidated, journal: Journal, *, is_named: bool, host: Any = None) -> Start:
    """Return the start of a node that was given the folder, or that has to fetch it from Bob."""
    manifest = resumed_manifest(model, {"name": "more"}, Path(), 0)
    assert manifest.start is not None
    settings = NodeSettings(home=home, start=model.path if is_named else None)
    membership: Any = SimpleNamespace(start_holders=lambda checkpoint_id: [BOB], everyone=frozenset({BOB}))
    conditions = Conditions(host, RUN)
    return Start(manifest.start, Downloads(host, conditions, WeightFiles(settings, manifest), membership, journal))


async def test_what_is_damaged_is_taken_anew_from_the_folder_named(
    tmp_path: Path, model: Consolidated, journal: Journal
) -> None:
    question = BlockQuestion(model.index.run_id, 0, model.id)
    for _ in range(2):
        start = start_at(tmp_path, model, journal, is_named=True)
        await start.open()
        assert start.path_of(0) == tmp_path / "start" / CHECKPOINT_NAME
        held = start.find(question)
        assert held is not None
        (tmp_path / "start" / INDEX_NAME).write_bytes(b"half of")
    assert "cannot be used" in journal.warnings[-1]
    assert model.checkpoint.exists()


async def test_a_node_without_the_folder_fetches_it_from_one_that_has_it_and_gives_it_in_turn(
    tmp_path: Path, model: Consolidated, journal: Journal, nursery: trio.Nursery
) -> None:
    alice = start_at(tmp_path / "alice", model, journal, is_named=True)
    await alice.open()

    async def find(question: BlockQuestion) -> Holding | None:
        await trio.lowlevel.checkpoint()
        return alice.find(question)

    host = ToDonor(nursery, BlockService(Conditions(NOBODY, RUN), find).serve)
    carol = start_at(tmp_path / "carol", model, journal, is_named=False, host=host)
    await carol.open()
    assert await carol.obtain(0)
    path = carol.path_of(0)
    assert path is not None
    assert path.read_bytes() == model.checkpoint.read_bytes()
    assert carol.find(BlockQuestion(RUN, 0, model.id)) is not None
    assert carol.find(BlockQuestion(RUN, 0, bytes(32))) is None


@pytest.mark.parametrize("is_there", [False, True])
async def test_what_no_member_has_and_a_disk_that_takes_nothing_cost_an_attempt_and_are_told(
    tmp_path: Path,
    model: Consolidated,
    journal: Journal,
    monkeypatch: pytest.MonkeyPatch,
    clock: MockClock,
    is_there: bool,
) -> None:
    async def ask_for_index(*args: object) -> tuple[SignedIndex, Index]:
        await trio.lowlevel.checkpoint()
        if not is_there:
            raise PeerUnreachableError("it has no such checkpoint")
        raw = (model.path / INDEX_NAME).read_bytes()
        return decode_signed_index(raw, model.index.run_id, model.index.size)

    monkeypatch.setattr(starting, "ask_for_index", ask_for_index)
    (tmp_path / "start").write_text("in the way of the folder")
    assert not await start_at(tmp_path, model, journal, is_named=False).obtain(0)
    if is_there:
        assert "cannot be stored" in journal.warnings[-1]
    else:  # the first line of the status knows these words
        assert (journal.state.phase, journal.state.phase_detail) == ("fetching weights", NO_START)
