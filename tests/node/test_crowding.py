"""Real daemons, and a member that sends them thousands of invented authors: they go on together."""

from __future__ import annotations

import hashlib
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.nurseries import open_service_nursery
from farandole.node.mesh.host import open_host
from farandole.node.mesh.yamux import Libp2pStream
from farandole.node.state.gossip import GossipService
from farandole.node.state.messenger import open_messenger
from farandole.node.state.store import open_store
from farandole.node.status.status import NodeStatus
from farandole.protocol.run.manifest import SignedManifest
from farandole.protocol.state.antientropy import PROTOCOL as SYNC_PROTOCOL
from farandole.protocol.state.entries import Beat, Delta, Kind, Member, Proof, entry_id
from farandole.protocol.state.push import PROTOCOL as PUSH_PROTOCOL
from farandole.protocol.state.state import MAX_AUTHORS, RunState
from farandole.protocol.state.writer import Writer
from farandole.protocol.wire.identity import public_bytes, public_key_of

from ..patience import PATIENCE
from .daemons import Daemon, two_that_average
from .hosts import LOOPBACK
from .state.test_gossip import push, signed

NUM_KEYS = 5_389
"""Keys that precede a real member's in the order of a hash, and more than there are places: once, they expelled it."""
BATCH = 60


def fork(run_id: bytes) -> Proof:
    key = Ed25519PrivateKey.generate()
    stories = [signed(key, Kind.MEMBER, Member(device=device), run_id=run_id) for device in ("a", "b")]
    a, b = sorted(stories, key=lambda story: entry_id(story.author, story.body))
    return Proof(a, b)


def ground_keys(run_id: bytes, victims: list[bytes]) -> list[Ed25519PrivateKey]:
    def rank(key: bytes) -> bytes:
        return hashlib.sha256(run_id + key).digest()

    found: list[Ed25519PrivateKey] = []
    while len(found) < NUM_KEYS:
        key = Ed25519PrivateKey.generate()
        if rank(public_bytes(key)) < max(map(rank, victims)):
            found.append(key)
    return found


@asynccontextmanager
async def light_member(folder: Path, run: SignedManifest, contact: Daemon) -> AsyncIterator[GossipService]:
    """Run a member without a trainer that has synced with the contact and announced itself; the test sends the rest."""
    folder.mkdir()
    key, peer = Ed25519PrivateKey.generate(), public_key_of((await contact.status()).peer_id)
    state = RunState(run.run_id, run.creator, max_authors=2 * NUM_KEYS)
    async with (
        open_store(folder / "store.sqlite") as store,
        open_host(key, LOOPBACK) as host,
        open_messenger(host) as messenger,
    ):
        gossip = GossipService(
            state, Writer(key, run.run_id), host, messenger, store, random.Random(0), base_period=1.0
        )
        host.dialler.add_addresses(peer, contact.addresses)
        await host.connect(peer)
        async with open_service_nursery() as nursery:
            await nursery.start(gossip.run)
            assert await gossip.join()
            await gossip.publish(Kind.MEMBER, 0, Member())
            yield gossip


class Liar:
    """A live member, connected to all, whose run state is full of authors that it has invented.

    Others request them by anti-entropy, and it pushes them too.
    """

    def __init__(self, gossip: GossipService) -> None:
        self.gossip = gossip
        self.was_asked = defaultdict[bytes, trio.Event](trio.Event)

    async def serve(self, stream: Libp2pStream) -> None:
        await self.gossip._serve(stream)
        self.was_asked[stream.peer].set()

    async def live(self) -> None:
        while True:
            await self.gossip.publish(Kind.MEMBER, 0, Member(device="liar", is_paused=True))
            await self.gossip.publish(Kind.BEAT, 0, Beat(0, 0, None, 0))
            await trio.sleep(1.0)

    async def push(self, peer: bytes, payloads: list[bytes]) -> None:
        """Push slowly enough not to count as a flood."""
        for payload in payloads:
            self.gossip._messenger.send_nowait(peer, PUSH_PROTOCOL, payload)
            await trio.sleep(0.02)


def goes_on(status: NodeStatus, num_before: int) -> bool:
    """Return whether the node exchanges with all others: alice, bob, and the liar, which does not train."""
    return status.exchanges_ok > num_before + 1 and status.run.members_live == 3


@pytest.mark.soak
async def test_ground_keys_and_proofs_expel_nobody(tmp_path: Path, run: SignedManifest, texts: Path) -> None:
    async with two_that_average(tmp_path, run.run_id, "--data", str(texts)) as (alice, bob):
        victims = [public_key_of((await daemon.status()).peer_id) for daemon in (alice, bob)]
        authors = ground_keys(run.run_id, victims)
        invented = [signed(author, Kind.MEMBER, Member(), run_id=run.run_id) for author in authors]
        proofs = [fork(run.run_id) for _ in range(300)]
        async with light_member(tmp_path / "mallory", run, alice) as gossip, trio.open_nursery() as nursery:
            gossip.state.merge(Delta(tuple(invented), tuple(proofs)), time.time())
            liar, host = Liar(gossip), gossip._host
            host.set_handler(SYNC_PROTOCOL, liar.serve)
            await host.connect(victims[1], bob.addresses)
            nursery.start_soon(liar.live)
            batches = [push(*invented[first : first + BATCH]) for first in range(0, 3_000, BATCH)]
            batches += [push(proofs=tuple(proofs[first : first + 20])) for first in range(0, 300, 20)]
            for victim in victims:
                nursery.start_soon(liar.push, victim, batches)
            with trio.fail_after(PATIENCE):
                for victim in victims:
                    await liar.was_asked[victim].wait()
                for daemon in (alice, bob):
                    num_before = (await daemon.status()).exchanges_ok
                    await daemon.until(partial(goes_on, num_before=num_before))
            assert host.connected >= set(victims), "they have not been flooded"
            for daemon in (alice, bob):  # and its owner is told who it is
                await daemon.until(lambda status: "crowd others out" in str(status.warnings))
            nursery.cancel_scope.cancel()
    assert NUM_KEYS > MAX_AUTHORS
