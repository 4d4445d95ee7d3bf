"""The stage that a node has: kept for its next life, and announced in the DHT."""

from __future__ import annotations

from typing import Final

import trio

from farandole.protocol.mesh.kademlia import run_key, shard_key

from ..mesh.host import Host
from ..state.membership import Membership
from ..state.store import StoreError
from .parts import Daemon

STAGE_FACT: Final = "stage"


class StageRecord:
    """The record of this node's stage: on its disk, for the next start of the node, and in the DHT."""

    def __init__(self, daemon: Daemon, host: Host, run_id: bytes, membership: Membership) -> None:
        self._daemon = daemon
        self._host = host
        self._run_id = run_id
        self._membership = membership
        self._moved = trio.Event()

    async def note(self, stage: int) -> None:
        """Record that this node has that stage now."""
        try:
            await self._daemon.store.put_fact(STAGE_FACT, b"%d" % stage)
        except StoreError as error:
            self._daemon.journal.warn(f"{error}; after a restart this node may take another stage")
        for other in range(self._membership.num_stages):
            if other != stage:
                self._host.dht.withdraw(shard_key(self._run_id, other))
        self._moved.set()

    async def run(self) -> None:
        """Announce the run and this node's shard in the DHT, until cancelled; the host announces them again."""
        await self._host.dht.provide(run_key(self._run_id))
        while True:
            self._moved = trio.Event()
            await self._host.dht.provide(shard_key(self._run_id, self._membership.stage))
            await self._moved.wait()
