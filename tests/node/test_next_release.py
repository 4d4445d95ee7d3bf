"""A rolling upgrade: nodes of this release and of the next train together, or both say why they cannot."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import msgspec

from farandole.node.base.project import VERSION
from farandole.node.state.store import open_store
from farandole.node.status.status import NodeStatus
from farandole.protocol.run.manifest import SignedManifest
from farandole.protocol.state.entries import Kind, decode_delta
from farandole.protocol.wire.identity import public_key_of

from ..next_release.sitecustomize import VERSION as NEXT_VERSION
from .daemons import farandole, joined, other_source, two_that_average

PLAN = 19


async def fields_of(home: Path, author: bytes) -> dict[int, list[Any]]:
    """Return the payloads of an author's entries in a node's store, by kind."""
    async with open_store(home / "store.sqlite") as store:
        entries = decode_delta((await store.load_authors())[author]).entries
    return {kind: fields for kind, _, _, fields in (msgspec.msgpack.decode(signed.body) for signed in entries)}


async def test_two_releases_train_together_and_keep_what_only_one_of_them_knows(
    tmp_path: Path, run: SignedManifest, texts: Path
) -> None:
    data = ("--data", str(texts))
    async with two_that_average(tmp_path, run.run_id, *data, bobs=other_source("entries")) as (alice, bob):
        await alice.says("averaged with", bob.name)

        def is_seen(status: NodeStatus) -> bool:
            return status.run.versions == {VERSION: 1, NEXT_VERSION: 1}

        status = await alice.until(is_seen)
        assert (await bob.until(is_seen)).version == NEXT_VERSION
        assert status.release_conflict is None
        assert NEXT_VERSION in (await farandole(alice.home, "peers")).out
        author = public_key_of((await bob.status()).peer_id)

        # Carol, of this release, gets Bob's entries from Alice too.
        async with joined(tmp_path / "carol", alice.invite(run.run_id), *data) as carol:
            await carol.says("averaged with")
            await carol.end(signal.SIGTERM)
        await alice.end(signal.SIGTERM)
        await bob.says(alice.name, "is gone")
        assert not [line for daemon in (alice, bob, carol) for line in daemon.said if "release" in line]
    for home in (alice.home, carol.home):
        fields = await fields_of(home, author)
        assert fields[PLAN] == ["on"]
        assert fields[Kind.MEMBER][9:] == [NEXT_VERSION, "", "fine"]


async def test_nodes_that_cannot_average_say_so_at_both_ends_with_the_remedy(
    tmp_path: Path, run: SignedManifest, texts: Path
) -> None:
    data = ("--data", str(texts))
    async with joined(tmp_path / "alice", str(tmp_path / "run.manifest"), *data) as alice:
        await alice.says("listening on")
        async with joined(tmp_path / "bob", alice.invite(run.run_id), *data, env=other_source("exchange")) as bob:
            told = await alice.says("warning:", f"1 connected peer runs farandole {NEXT_VERSION}")
            assert "upgrade this node" in told
            told = await bob.says("warning:", f"1 connected peer runs farandole {VERSION}")
            assert "ask their owners to upgrade" in told
            status = await alice.until(lambda status: any(member.is_apart for member in status.members))
            assert status.release_conflict is not None
            assert status.release_conflict.newer == (NEXT_VERSION,)
            assert "other release" in (await farandole(alice.home, "peers")).out
            await alice.says("alone: no peer is live")
            assert not [line for line in alice.said if "failed" in line]
