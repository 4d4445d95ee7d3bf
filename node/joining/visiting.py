"""Looking into a run without being of it: what `farandole checkpoint list` and `pull` do with an invite.

A visitor has a key of its own, for one visit: the home's may be in use by a node, and two hosts of one name would take
each other's connections. It announces nothing, so nobody counts on it; it hears the run state by anti-entropy.

    host -> connectivity -> manifest -> run state
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.entries import CheckpointNotice, Kind
from farandole.protocol.invite import Invite, split_address
from farandole.protocol.manifest import Manifest, decode_manifest
from farandole.protocol.state import RunState
from farandole.protocol.writer import Writer

from ..errors import JoinError
from ..exchanges.bulk import BulkService, open_bulk
from ..nurseries import open_service_nursery
from ..p2p.host import Host, open_host
from ..reach.connectivity import open_connectivity
from ..run_state.gossip import GossipService
from ..run_state.messenger import open_messenger
from ..run_state.store import open_store
from ..settings import NodeSettings
from ..shaping import Shaping
from ..status.board import Board
from .joining import JOIN_TIMEOUT, Target, connect_to_run, obtain_manifest
from .mdns import open_mdns

# A member that has just begun serves its run state within a second.
SYNC_RETRY: Final = 1.0


@dataclass(frozen=True)
class Visit:
    """What a visitor has, while the visit lasts."""

    host: Host
    shaping: Shaping
    channels: BulkService
    manifest: Manifest
    raw_manifest: bytes
    run_id: bytes
    state: RunState
    gossip: GossipService

    def live(self) -> frozenset[bytes]:
        """The live members."""
        members = self.state.members()
        return frozenset(peer for peer in self.gossip.liveness.live(trio.current_time()) if peer in members)

    def members_of(self, stage: int) -> frozenset[bytes]:
        """The live members that hold a stage."""
        members = self.state.members()
        return frozenset(peer for peer in self.live() if members[peer].stage == stage)

    def notices(self) -> list[tuple[bytes, CheckpointNotice]]:
        """What live members say that they hold."""
        live = self.live()
        return [(entry.author, entry.payload) for entry in self.state.entries(Kind.CHECKPOINT) if entry.author in live]


@asynccontextmanager
async def open_visit(
    invite: Invite, settings: NodeSettings, shaping: Shaping, say: Callable[[str], None]
) -> AsyncIterator[Visit]:
    """As long as the block runs; of the settings those count that say how to connect.

    Raises `JoinError` if the run cannot be reached within two minutes.
    """
    key, board = Ed25519PrivateKey.generate(), Board(say)
    peers: dict[bytes, list[str]] = {}
    for address in (*invite.addresses, *settings.bootstrap):
        peers.setdefault(split_address(address)[1], []).append(address)
    target = Target(invite.run_id, None, peers)
    with tempfile.TemporaryDirectory(prefix="farandole-visit-") as folder:
        async with (
            open_store(Path(folder) / "store.sqlite") as store,
            open_host(key, settings.listen, shaping=shaping) as host,
            open_messenger(host) as messenger,
            open_connectivity(host, key, target.run_id, shaping, peers),
            open_mdns(host, [target.run_id], is_on=settings.mdns),
            open_bulk(host, shaping) as channels,
        ):
            manifest, raw = await _find_run(host, target, board)
            state = RunState(target.run_id, decode_manifest(raw)[1].creator)
            gossip = GossipService(state, Writer(key, target.run_id), host, messenger, store, random.Random())
            async with open_service_nursery() as nursery:
                await nursery.start(gossip.run)
                await _sync(gossip)
                yield Visit(host, shaping, channels, manifest, raw, target.run_id, state, gossip)


async def _find_run(host: Host, target: Target, board: Board) -> tuple[Manifest, bytes]:
    with trio.move_on_after(JOIN_TIMEOUT):
        await connect_to_run(host, target, board)
        return await obtain_manifest(host, target, board)
    raise JoinError(
        f"no member of the run could be reached within {JOIN_TIMEOUT:g} s. Ask for a newer invite, and let "
        "`farandole doctor` look at it"
    )


async def _sync(gossip: GossipService) -> None:
    with trio.move_on_after(JOIN_TIMEOUT):
        while True:
            if await gossip.join():
                return
            await trio.sleep(SYNC_RETRY)
    raise JoinError(f"members were found, but none gave its run state within {JOIN_TIMEOUT:g} s. Try again later")
