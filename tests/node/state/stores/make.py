"""Writes a store as the release does that runs this: its run state, facts, address book and mark.

In a checkout of that release: ``python -m tests.node.state.stores.make FILE``. The store is the test's from then on; a
release whose layout or entries differ gets another file.
"""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import trio

from farandole.node.state.store import MANIFEST_FACT, open_store
from farandole.protocol.run.manifest import sign_manifest
from farandole.protocol.state.entries import (
    Beat,
    CheckpointNotice,
    Delta,
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
from tests.node.small_runs import small_manifest
from tests.node.state.test_gossip import MemoryHost, Wires, gossip_over
from tests.protocol.authors import CREATOR, NOW, RUN_ID, author_of, key_of, signed, tick_at

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


async def write(path: Path) -> None:
    """Write the store of author 1, which knows author 2 and the creator."""
    async with open_store(path) as store, trio.open_nursery() as nursery:
        state = RunState(RUN_ID, CREATOR)
        wires = Wires(nursery)
        host = MemoryHost(wires, author_of(OWN))
        gossip = gossip_over(OWN, state, host, store)
        await nursery.start(gossip.run)
        for kind, payload in PAYLOADS.items():
            await gossip.publish(kind, 0, payload)
            state.merge(Delta((signed(2, kind, 0, tick_at(kind), payload),)), NOW)
        notice = signed(255, Kind.NOTICE, 0, tick_at(Kind.NOTICE), Notice("say", "hello"))
        state.merge(Delta((notice,)), NOW)
        await store.put_fact(MANIFEST_FACT, sign_manifest(small_manifest(), key_of(255)).encode())
        await store.put_fact("tokens", b"640")
        await store.save_peers([(author_of(2), b'["/ip4/127.0.0.1/tcp/4001"]', NOW)], [])
        nursery.cancel_scope.cancel()
    with closing(sqlite3.connect(path, isolation_level=None)) as small:  # 6 kB, where SQLite's pages take 30
        for statement in ("journal_mode=DELETE", "page_size=512"):
            small.execute(f"PRAGMA {statement}")
        small.execute("VACUUM")


if __name__ == "__main__":
    trio.run(write, Path(sys.argv[1]))
