"""A process of the benchmark of homes: a member of a run that does not train, in a home of the NAT lab or in the open.

It is assembled, in the same order, as `farandole.node.daemon` and `farandole.node.member` are, without a trainer: it
dials the invite's peers, takes over their run state, announces its own addresses, and stays connected with all members
that it learns of.
"""

from __future__ import annotations

import logging
import random
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import trio
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.bandwidth import Shaping
from farandole.node.base.settings import PORT_LEASE_SECONDS
from farandole.node.bulk.exchange_service import ExchangeService
from farandole.node.bulk.negotiation import open_bulk
from farandole.node.bulk.pipe import Outgoing
from farandole.node.join.bootstrap import Target, connect_to_run
from farandole.node.mesh.host import open_host
from farandole.node.mesh.reach.connectivity import open_connectivity
from farandole.node.state.connections import ConnectionKeeper
from farandole.node.state.gossip import GossipService
from farandole.node.state.membership import Announcer, Membership
from farandole.node.state.messenger import open_messenger
from farandole.node.state.store import open_store
from farandole.node.status.journal import Journal
from farandole.protocol.mesh.kademlia import run_key
from farandole.protocol.mesh.reachability import ReachabilityKind
from farandole.protocol.mesh.relay import Limits
from farandole.protocol.state.state import RunState
from farandole.protocol.state.writer import Writer

from ..process import BenchError
from .exchange import exchange_with

logger = logging.getLogger("farandole.bench")


class HomeNode:
    """Answers the requests. Peers and runs are in hexadecimal."""

    _began_at = 0.0

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        logging.basicConfig(stream=sys.stderr, format="%(asctime)s.%(msecs)03d %(name)s %(message)s", datefmt="%X")
        logging.getLogger("farandole").setLevel(logging.DEBUG)

    async def join(self, run: str, port: int, peers: dict[str, list[str]]) -> dict[str, Any]:
        """Become a member on this port or any (0); must be the first request, and only once.

        ``peers`` are the invite's. Seconds are counted from here on.
        """
        self._began_at = trio.current_time()
        run_id, enter = bytes.fromhex(run), self._stack.enter_async_context
        known = {bytes.fromhex(peer): addresses for peer, addresses in peers.items()}
        key, rng, shaping = Ed25519PrivateKey.generate(), random.Random(), Shaping()
        journal = Journal(say=logger.info)
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        store = await enter(open_store(Path(folder, "store.sqlite")))
        self._host = host = await enter(open_host(key, [f"/ip4/0.0.0.0/tcp/{port}"], shaping=shaping))
        messenger = await enter(open_messenger(host))
        self._connectivity = await enter(
            open_connectivity(host, key, run_id, shaping, known, Limits(), port_lease=PORT_LEASE_SECONDS)
        )
        state = RunState(run_id, bytes(32))
        self._gossip = GossipService(state, Writer(key, run_id), host, messenger, store, rng)
        self._announcer = Announcer(host, self._gossip, journal, incarnation=time.time_ns() // 1_000_000)
        membership = Membership(host, state, self._gossip, journal, self._announcer)
        connections = ConnectionKeeper(host, membership, self._gossip.liveness, lambda peer: None)
        await connect_to_run(host, Target(run_id, None, known), journal)
        channels = await enter(open_bulk(host, run_id, shaping, self._connectivity))
        self._exchanges = ExchangeService(host, channels, shaping)
        nursery = await enter(trio.open_nursery())
        self._stack.callback(nursery.cancel_scope.cancel)
        await nursery.start(self._gossip.run)
        if known and await self._gossip.join() == 0:
            raise BenchError("none of the invite's peers gave its run state")
        membership.refresh()
        await self._announcer.announce()
        await self._announcer.beat()

        async def follow() -> None:
            """Keep the members as candidates for relays."""
            while True:
                host.relays.members = membership.everyone
                await membership.changed()

        for run_on in (membership.run, self._announcer.run, connections.run, follow):
            nursery.start_soon(run_on)
        nursery.start_soon(host.dht.provide, run_key(run_id))
        return {"peer": host.author.hex(), "addresses": host.addresses}

    async def be_public(self, seconds: float) -> dict[str, Any]:
        """Wait until this node knows that others can dial it, which makes it a relay."""
        reachability = self._connectivity.reachability
        with trio.move_on_after(seconds):
            while reachability.kind is not ReachabilityKind.PUBLIC:
                await reachability.changed()
        return {"is_public": reachability.kind is ReachabilityKind.PUBLIC}

    async def meet(self, peer: str, connect_seconds: float, direct_seconds: float) -> dict[str, Any]:
        """Wait for a connection with a peer, from either side, then for a direct one; return the times of both."""
        host, other = self._host, bytes.fromhex(peer)
        connected_s = direct_s = None
        with trio.move_on_at(self._began_at + connect_seconds):
            async for who, is_connected in host.connections.events():
                if who == other and is_connected:
                    connected_s = trio.current_time() - self._began_at
                    break
        if connected_s is not None:
            with trio.move_on_after(direct_seconds):
                await host.connections.wait_direct(other)
                direct_s = trio.current_time() - self._began_at
        return {"connected_s": connected_s, "direct_s": direct_s}

    async def exchange(self, peer: str, size: int) -> dict[str, Any]:
        """Exchange random fp32 of ``size`` bytes for the peer's, and take the mean: both means must hash alike."""
        host, other = self._host, bytes.fromhex(peer)
        was_relayed = host.connections.path(other) == "relayed"
        seed = int.from_bytes(host.author[:8], "big")
        own = np.random.default_rng(seed).standard_normal(size // 4, dtype=np.float32).tobytes()
        received = bytearray(len(own))
        outgoing, is_initiator = Outgoing(memoryview(own), blake3(own).digest()), host.author < other
        result = await exchange_with(
            self._exchanges, other, 0, outgoing, memoryview(received), is_initiator=is_initiator
        )
        mean = (np.frombuffer(own, np.float32) + np.frombuffer(received, np.float32)) / 2
        way = "bulk" if result.path == "bulk" else "relayed stream" if was_relayed else "stream"
        return {
            "committed": result.committed,
            "reason": result.reason,
            "seconds": result.seconds,
            "way": way,
            "path": host.connections.path(other),
            "own": blake3(own).hexdigest(),
            "received": blake3(received).hexdigest(),
            "mean": blake3(mean.tobytes()).hexdigest(),
        }

    async def leave(self) -> dict[str, Any]:
        """Say farewell to the run."""
        await self._announcer.announce(left=True)
        await self._gossip.flush()
        return {}
