"""A process of the benchmark of homes: a member of a run that does not train, in a home of the NAT lab or in the open.

It is assembled, in the same order, as `farandole.node.daemon` and `farandole.node.member` are, without a trainer: it
dials the invite's peers, takes over their run state, announces its own addresses, and stays connected with all members
that it learns of.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
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
from farandole.node.mesh.host import Host, open_host
from farandole.node.mesh.reach.connectivity import Connectivity, open_connectivity
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


@dataclass(frozen=True)
class NatMember:
    """The parts of a member that are used here; made by `open_member`."""

    host: Host
    connectivity: Connectivity
    gossip: GossipService
    membership: Membership
    exchanges: ExchangeService


@contextlib.asynccontextmanager
async def open_member(run_id: bytes, port: int, peers: dict[bytes, list[str]]) -> AsyncIterator[NatMember]:
    """Open a member that takes part until the block ends, on this port or any (0); ``peers`` are the invite's."""
    key, rng, shaping = Ed25519PrivateKey.generate(), random.Random(), Shaping()
    journal = Journal(say=logger.info)
    with tempfile.TemporaryDirectory() as folder:
        async with (
            open_store(Path(folder, "store.sqlite")) as store,
            open_host(key, [f"/ip4/0.0.0.0/tcp/{port}"], shaping=shaping) as host,
            open_messenger(host) as messenger,
            open_connectivity(
                host, key, run_id, shaping, peers, Limits(), port_lease=PORT_LEASE_SECONDS
            ) as connectivity,
        ):
            state = RunState(run_id, bytes(32))
            gossip = GossipService(state, Writer(key, run_id), host, messenger, store, rng)
            announcer = Announcer(host, gossip, journal, incarnation=time.time_ns() // 1_000_000)
            membership = Membership(host, state, gossip, journal, announcer)
            connections = ConnectionKeeper(host, membership, gossip.liveness, lambda peer: None)
            await connect_to_run(host, Target(run_id, None, peers), journal)
            async with open_bulk(host, run_id, shaping, connectivity) as channels, trio.open_nursery() as nursery:
                exchanges = ExchangeService(host, channels, shaping)
                await nursery.start(gossip.run)
                if peers and await gossip.join() == 0:
                    raise BenchError("none of the invite's peers gave its run state")
                membership.refresh()
                await announcer.announce()
                await announcer.beat()
                nursery.start_soon(membership.run)
                nursery.start_soon(announcer.run)
                nursery.start_soon(connections.run)
                nursery.start_soon(_follow, membership, host)
                nursery.start_soon(host.dht.provide, run_key(run_id))
                yield NatMember(host, connectivity, gossip, membership, exchanges)
                nursery.cancel_scope.cancel()


async def _follow(membership: Membership, host: Host) -> None:
    """Keep the members as candidates for relays."""
    while True:
        host.relays.members = membership.everyone
        await membership.changed()


class HomeNode:
    """Answers the requests. Peers and runs are in hexadecimal."""

    _began_at = 0.0
    _member: NatMember

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        logging.basicConfig(stream=sys.stderr, format="%(asctime)s.%(msecs)03d %(name)s %(message)s", datefmt="%X")
        logging.getLogger("farandole").setLevel(logging.DEBUG)

    async def join(self, run: str, port: int, peers: dict[str, list[str]]) -> dict[str, Any]:
        """Become a member; must be the first request, and only once. Seconds are counted from here on."""
        self._began_at = trio.current_time()
        known = {bytes.fromhex(peer): addresses for peer, addresses in peers.items()}
        self._member = await self._stack.enter_async_context(open_member(bytes.fromhex(run), port, known))
        return {"peer": self._member.host.author.hex(), "addresses": self._member.host.addresses}

    async def be_public(self, seconds: float) -> dict[str, Any]:
        """Wait until this node knows that others can dial it, which makes it a relay."""
        reachability = self._member.connectivity.reachability
        with trio.move_on_after(seconds):
            while reachability.kind is not ReachabilityKind.PUBLIC:
                await reachability.changed()
        return {"is_public": reachability.kind is ReachabilityKind.PUBLIC}

    async def meet(self, peer: str, connect_seconds: float, direct_seconds: float) -> dict[str, Any]:
        """Wait for a connection with a peer, from either side, then for a direct one; return the times of both."""
        host, other = self._member.host, bytes.fromhex(peer)
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
        host, other = self._member.host, bytes.fromhex(peer)
        was_relayed = host.connections.path(other) == "relayed"
        seed = int.from_bytes(host.author[:8], "big")
        own = np.random.default_rng(seed).standard_normal(size // 4, dtype=np.float32).tobytes()
        received = bytearray(len(own))
        outgoing, is_initiator = Outgoing(memoryview(own), blake3(own).digest()), host.author < other
        exchanges = self._member.exchanges
        result = await exchange_with(exchanges, other, 0, outgoing, memoryview(received), is_initiator=is_initiator)
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
        await self._member.membership.announcer.announce(left=True)
        await self._member.gossip.flush()
        return {}
