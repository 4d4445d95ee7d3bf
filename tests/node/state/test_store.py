from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
import trio

from farandole.node.base.errors import Exit
from farandole.node.state.store import LAYOUT, MANIFEST_FACT, MAX_FACT_BYTES, Store, StoreError, open_store, read_fact
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
from farandole.protocol.state.writer import Mark

from ...protocol.authors import CREATOR, NOW, RUN_ID, author_of
from ..conftest import Cli
from .test_gossip import GossipHost, Wires, gossip_over


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "store.sqlite"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[Store]:
    async with open_store(path) as opened:
        yield opened


async def test_what_is_kept_is_there_after_a_restart(path: Path) -> None:
    async with open_store(path) as store:
        await store.save_authors({b"a" * 32: b"entries", b"b" * 32: b"others"})
        await store.save_authors({b"a" * 32: b"newer", b"b" * 32: None, b"c" * 32: None})
        await store.put_fact("manifest", b"bytes")
        await store.put_fact("manifest", b"newer bytes")
        await store.save_mark(((1, 1_750_000_000),))
        await store.save_mark(((1, 1_750_000_005), (1_760_000_000, 1_760_000_009)))
        await store.save_peers([(b"a", b"[]", 1.0), (b"b", b"[]", 2.0)], [])
        await store.save_peers([(b"a", b'["/ip4/1.1.1.1/tcp/1"]', 3.0)], [b"b", b"c"])
    async with open_store(path) as store:
        assert await store.load_authors() == {b"a" * 32: b"newer"}
        assert await store.get_fact("manifest") == b"newer bytes"
        assert await store.get_fact("nothing") is None
        assert await store.load_mark() == ((1, 1_750_000_005), (1_760_000_000, 1_760_000_009))
        assert await store.load_peers() == [(b"a", b'["/ip4/1.1.1.1/tcp/1"]', 3.0)]


async def test_a_fact_is_read_while_a_daemon_has_the_store_and_a_damaged_one_is_left_as_it_is(path: Path) -> None:
    assert read_fact(path, "manifest") is None
    assert not path.parent.exists()
    async with open_store(path) as store:
        for content in (b"bytes", b"newer bytes"):
            await store.put_fact("manifest", content)
            assert read_fact(path, "manifest") == content
        assert read_fact(path, "nothing") is None
    assert read_fact(path, "manifest") == b"newer bytes"
    path.write_bytes(b"damaged" * 1_000)
    there = set(path.parent.iterdir())
    with pytest.raises(StoreError, match="cannot read"):
        read_fact(path, "manifest")
    assert set(path.parent.iterdir()) == there


async def test_a_full_disk_is_said_to_be_full_and_forgotten_when_there_is_room(path: Path) -> None:
    async with open_store(path):
        pass
    with closing(sqlite3.connect(path, check_same_thread=False, isolation_level=None)) as connection:
        store = Store(connection, path.with_name("mark"))
        (num_pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {num_pages}")
        with pytest.raises(StoreError, match="full"):
            await store.put_fact("large", bytes(MAX_FACT_BYTES))
        connection.execute(f"PRAGMA max_page_count = {2**30}")
        await store.put_fact("large", bytes(MAX_FACT_BYTES))
        assert await store.get_fact("large") == bytes(MAX_FACT_BYTES)


async def test_a_failed_write_changes_nothing(store: Store) -> None:
    await store.save_authors({b"a": b"one"})
    with pytest.raises(StoreError):
        await store.save_authors({b"a": b"two", b"b": object()})  # type: ignore[dict-item]
    assert await store.load_authors() == {b"a": b"one"}
    with pytest.raises(ValueError, match="bytes"):
        await store.put_fact("large", bytes(MAX_FACT_BYTES + 1))


async def test_a_damaged_database_is_put_aside(path: Path) -> None:
    async with open_store(path) as store:
        await store.save_authors({b"a": b"one"})
        await store.save_mark(((7, 77),))
    path.write_bytes(b"no database at all, but long enough to be read as one" * 100)
    async with open_store(path) as store:
        assert await store.load_authors() == {}
        assert await store.load_mark() == ((7, 77),), "the mark cannot be had from peers, and is a file of its own"
    assert path.with_name("store.sqlite.damaged").exists()


async def test_a_mark_of_an_older_version_means_all_up_to_it(path: Path) -> None:
    path.parent.mkdir()
    path.with_name("store.sqlite.mark").write_bytes(b"%020d\n" % 1_750_000_000)
    async with open_store(path) as store:
        assert await store.load_mark() == ((0, 1_750_000_000),)


async def test_a_folder_that_takes_no_file_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "store.sqlite").mkdir()
    with pytest.raises(StoreError, match="cannot open"):
        async with open_store(tmp_path / "store.sqlite"):
            pass


WRITER = """
import sys, trio
from pathlib import Path
from farandole.node.state.store import open_store
from farandole.protocol.state.writer import Mark

async def main():
    async with open_store(Path(sys.argv[1])) as store:
        for number in range(1_000_000):
            row = number.to_bytes(8, "big")
            await store.save_authors({bytes((author,)) * 32: row * 500 for author in range(20)})
            await store.save_mark(((0, number),))
            print(number, flush=True)

trio.run(main)
"""


async def read_back(path: Path) -> tuple[dict[bytes, bytes], Mark]:
    async with open_store(path) as store:
        return await store.load_authors(), await store.load_mark()


def test_a_kill_amid_a_flush_leaves_a_whole_batch(path: Path) -> None:
    confirmed = -1
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(25):
            confirmed = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        confirmed = max([confirmed, *map(int, process.stdout.read().split())])
        process.stdout.close()
        process.wait()
        rows, mark = trio.run(read_back, path)
        assert len(rows) == 20
        assert len(set(rows.values())) == 1, "all of a batch, or nothing of it"
        assert int.from_bytes(next(iter(rows.values()))[:8], "big") in (confirmed, confirmed + 1)
        assert mark in (((0, confirmed),), ((0, confirmed + 1),))


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
