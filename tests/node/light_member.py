"""A member without a trainer: its own key, a real host and run state, and entries chosen by the test."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.nurseries import open_service_nursery
from farandole.node.mesh.host import open_host
from farandole.node.state.gossip import GossipService
from farandole.node.state.messenger import open_messenger
from farandole.node.state.store import open_store
from farandole.protocol.run.manifest import SignedManifest
from farandole.protocol.state.entries import Kind, Member
from farandole.protocol.state.state import RunState
from farandole.protocol.state.writer import Writer
from farandole.protocol.wire.identity import public_key_of

from .daemons import Daemon
from .hosts import LOOPBACK


@asynccontextmanager
async def light_member(folder: Path, run: SignedManifest, contact: Daemon) -> AsyncIterator[GossipService]:
    """Run a member that has synced with the contact and announced itself; the test sends its heartbeats."""
    folder.mkdir()
    key, peer = Ed25519PrivateKey.generate(), public_key_of((await contact.status()).peer_id)
    state = RunState(run.run_id, run.creator)
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
