"""The weights that a run starts from, if this node's disk has lost or refuses them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from farandole.node.base.errors import PeerUnreachableError
from farandole.node.base.settings import NodeSettings
from farandole.node.status.journal import Journal
from farandole.node.status.status import NO_START
from farandole.node.store.consolidated.folder import CHECKPOINT_NAME, INDEX_NAME, Consolidated
from farandole.node.store.consolidated.resume import resumed_manifest
from farandole.node.store.disk_space import WeightFiles
from farandole.node.transfers import start as starting
from farandole.node.transfers.giver import BlockService, Holding
from farandole.node.transfers.receiver import Conditions, Downloads
from farandole.node.transfers.start import Start
from farandole.protocol.checkpoints.block_transfer import BlockQuestion
from farandole.protocol.checkpoints.blocks import Index, SignedIndex, decode_signed_index

from ..store.consolidated.runs import MODELS, manifest_for, pulled
from .files import NOBODY, RUN, ToDonor

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
