"""Stores of other releases: older ones open with all that they hold, newer ones are refused untouched."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import trio

from farandole.node.base.exits import Exit
from farandole.node.state.store import LAYOUT, MANIFEST_FACT, StoreError, open_store, read_fact
from farandole.protocol.run.manifest import decode_manifest
from farandole.protocol.state.entries import (
    Beat,
    CheckpointNotice,
    Kind,
    Lease,
    LeasedSlices,
    Member,
    Notice,
    Payload,
    Progress,
    StageLease,
    Suspects,
)
from farandole.protocol.state.state import RunState

from ...protocol.authors import CREATOR, NOW, RUN_ID, author_of
from ..conftest import Cli
from .test_gossip import GossipHost, Wires, gossip_over

STORES = Path(__file__).parent / "stores"
# What author 1 wrote with the release of the store, and heard of author 2; the creator said hello.
OWN = 1
PAYLOADS: dict[Kind, Payload] = {
    Kind.MEMBER: Member(0, "cpu", 8_000, 100, ("/ip4/127.0.0.1/tcp/4001",), False, 7, True, False),
    Kind.BEAT: Beat(5, 1, 2_500_000, 100),
    Kind.PROGRESS: Progress(5, 1, 640, 1_000, 2_000),
    Kind.LEASE: Lease(0, b"c" * 8, (LeasedSlices(0, 8, 3),)),
    Kind.CHECKPOINT: CheckpointNotice(1, 0, b"i" * 32, 1_000, 640, 5),
    Kind.SUSPECTS: Suspects((b"suspect.",)),
    Kind.STAGE_LEASE: StageLease(0, 1, True),
}


def set_layout(path: Path, number: int) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version={number}")


@pytest.mark.parametrize("name", ["0.1.0.sqlite"])
async def test_an_older_store_opens_with_all_that_it_holds(name: str, tmp_path: Path, nursery: trio.Nursery) -> None:
    path = tmp_path / name
    for suffix in ("", ".mark"):
        shutil.copy(STORES / f"{name}{suffix}", f"{path}{suffix}")
    for _ in range(2):  # and again, once this release has written to it
        state = RunState(RUN_ID, CREATOR)
        async with open_store(path) as store:
            host = GossipHost(Wires(nursery), author_of(OWN))
            gossip = gossip_over(OWN, state, host, store)
            await gossip._load()
            for author in (OWN, 2):
                for kind, payload in PAYLOADS.items():
                    assert state.payload(author_of(author), type(payload)) == (None if kind is Kind.BEAT else payload)
            assert state.payload(CREATOR, Notice) == Notice("say", "hello")
            assert await store.load_mark() == ((int(NOW), int(NOW)),)
            assert await store.get_fact("tokens") == b"640"
            assert [peer for peer, _, _ in await store.load_peers()] == [author_of(2)]
            raw = await store.get_fact(MANIFEST_FACT)
            assert raw is not None
            assert decode_manifest(raw)[0].name == "small"
            assert {peer for peer, row in state.take_dirty().items() if row is None} == set()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (LAYOUT,)


async def test_a_newer_releases_store_is_refused_untouched_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    async with open_store(path) as store:
        await store.put_fact("tokens", b"640")
    set_layout(path, LAYOUT + 1)
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"newer farandole .* upgrade this node \(docs/volunteer.md#upgrade\)"):
        async with open_store(path):
            pass
    with pytest.raises(StoreError, match="upgrade this node"):
        read_fact(path, "tokens")
    assert path.read_bytes() == before
    assert not list(tmp_path.glob("*.damaged"))


def test_a_node_with_a_newer_store_ends_with_the_remedy(cli: Cli, home: Path) -> None:
    home.mkdir()
    set_layout(home / "store.sqlite", LAYOUT + 1)
    code, *said = cli("join")
    assert code == Exit.CANNOT_JOIN
    assert "upgrade this node" in "".join(said)
    assert "Traceback" not in "".join(said)
