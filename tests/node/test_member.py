"""A member whose disk or whose donors fail."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from farandole.node.app.commands.control import LEAVE_TIMEOUT
from farandole.node.base.bandwidth import Shaping
from farandole.node.base.settings import NodeSettings
from farandole.node.join.address_book import AddressBook
from farandole.node.loop.rest_service import Rest
from farandole.node.member.assembly import make_member
from farandole.node.member.parts import Daemon, Mesh
from farandole.node.member.run_member import FAREWELL_TIMEOUT, RunMember, leave_timeout, remember
from farandole.node.state.store import StoreError
from farandole.node.status.journal import Journal
from farandole.node.store import disk_space
from farandole.node.store.folder import CheckpointFolder
from farandole.protocol.state.believing import Partners
from farandole.protocol.wire.identity import public_bytes

from .hosts import until
from .small_runs import CREATOR, SIGNED


class FullDisk:
    """A store that refuses everything."""

    def __getattr__(self, name: str) -> Any:
        async def refuse(*args: object) -> None:
            await trio.lowlevel.checkpoint()
            raise StoreError("the disk is full")

        return refuse


def quiet_journal() -> Journal:
    return Journal(lambda text: None)


def member_at(folder: Path, journal: Journal | None = None, store: Any = None) -> RunMember:
    host: Any = SimpleNamespace(
        author=public_bytes(CREATOR),
        connected=frozenset(),
        addresses=[],
        set_handler=lambda *args: None,
        connections=SimpleNamespace(network_of=lambda peer: ""),
        gate=SimpleNamespace(roster=None),
    )
    messenger: Any = SimpleNamespace(set_receiver=lambda *args: None)
    connectivity: Any = SimpleNamespace(members=frozenset())
    unlimited: Any = None
    settings, store = NodeSettings(home=folder), store or FullDisk()
    daemon = Daemon(
        settings, CREATOR, store, AddressBook(store), Partners(), journal or quiet_journal(), trio.Event(), Rest()
    )
    mesh = Mesh(host, connectivity, Shaping(), unlimited)
    return make_member(daemon, mesh, messenger, SIGNED.encode(), None)


async def test_a_full_disk_does_not_end_the_node(
    nursery: trio.Nursery, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    journal = quiet_journal()
    member = member_at(tmp_path, journal)
    nursery.start_soon(remember, member.daemon, member.mesh.host, member.membership)
    await until(lambda: any("the disk is full" in warning for warning in journal.warnings))
    nursery.cancel_scope.cancel()


async def test_a_member_that_comes_back_says_its_round_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    journal = quiet_journal()
    member = member_at(tmp_path, journal, SimpleNamespace(get_fact=nothing))
    newest = CheckpointFolder(NodeSettings(home=tmp_path).checkpoints, 0).file(30)
    newest.parent.mkdir()
    newest.touch()
    monkeypatch.setattr(disk_space, "saved_round", {newest: 30}.get)
    await member.restore_counters(None)
    assert journal.state.round == 30


async def nothing(name: str) -> None:
    """Return no stored fact."""


async def test_who_leaves_is_told_that_its_trainer_was_too_slow_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    journal = quiet_journal()
    member = member_at(tmp_path, journal)
    monkeypatch.setattr(member.training, "leave", trio.sleep_forever)
    await member.end_training()
    assert "did not save within 15 s" in journal.warnings[-1]


def test_a_large_model_has_time_to_be_saved_and_who_waits_for_it_has_more() -> None:
    assert (leave_timeout(0), leave_timeout(16_000_000_000)) == (15.0, 175.0)  # a billion parameters
    assert leave_timeout(2_000_000_000, rate=20e6) == 115.0  # a save was slower than disks usually are
    assert leave_timeout(10**12) == 240.0
    assert leave_timeout(10**12) + FAREWELL_TIMEOUT < LEAVE_TIMEOUT
