"""A process of the benchmark of homes: a member of a run that trains nothing, in a home of the NAT lab or in the open.

    python -m farandole.testnet.bench.nat_node SOCKET

What it is made of, and the order, are `farandole.node.daemon` and `farandole.node.member` without a trainer: it dials
the invite's peers, takes over their run state, tells its own addresses, and keeps connections with all whom it hears
of. Requests come over the socket (`farandole.testnet.bench.requests`).
"""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import trio
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.bandwidth import Shaping
from farandole.node.base.settings import PORT_LEASE_SECONDS
from farandole.node.bulk.contributions import Outgoing
from farandole.node.bulk.exchange_service import ExchangeService
from farandole.node.bulk.negotiation import open_bulk
from farandole.node.join.bootstrap import Target, connect_to_run
from farandole.node.mesh.host import Host, open_host
from farandole.node.mesh.reach.connectivity import Connectivity, open_connectivity
from farandole.node.state.announcer import Announcer
from farandole.node.state.connections import Connections
from farandole.node.state.gossip import GossipService
from farandole.node.state.membership import Membership
from farandole.node.state.messenger import open_messenger
from farandole.node.state.store import open_store
from farandole.node.status.journal import Journal
from farandole.protocol.exchange_messages import Offer
from farandole.protocol.pairing_events import StartExchange
from farandole.protocol.reachability import ReachabilityKind
from farandole.protocol.records import run_key
from farandole.protocol.relay import Limits
from farandole.protocol.state import RunState
from farandole.protocol.writer import Writer

from .process import BenchError
from .requests import handle_request, read_requests, send_answer

# For 4 MB over a relay, an attempt at a bulk channel before it, and a busy machine.
EXCHANGE_SECONDS: Final = 60.0

logger = logging.getLogger("farandole.bench")


@dataclass(frozen=True)
class NatMember:
    """What is used of a member's parts; made by `open_member`."""

    host: Host
    connectivity: Connectivity
    gossip: GossipService
    membership: Membership
    exchanges: ExchangeService


@contextlib.asynccontextmanager
async def open_member(run_id: bytes, port: int, peers: dict[bytes, list[str]]) -> AsyncIterator[NatMember]:
    """It listens on this port, or any (0), and takes part until the block ends. ``peers``: those of the invite."""
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
            connections = Connections(host, membership, gossip.liveness, lambda peer: None)
            connectivity.members = lambda: membership.everyone
            await connect_to_run(host, Target(run_id, None, peers), journal)
            async with open_bulk(host, shaping) as channels, trio.open_nursery() as nursery:
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
                nursery.start_soon(host.provide, run_key(run_id))
                yield NatMember(host, connectivity, gossip, membership, exchanges)
                nursery.cancel_scope.cancel()


class NatNode:
    """What answers the requests. Peers, runs and sessions are hex digits."""

    def __init__(self, stack: contextlib.AsyncExitStack) -> None:
        self._stack = stack
        self._began_at = 0.0
        self._member: NatMember

    async def join(self, run: str, port: int, peers: dict[str, list[str]]) -> dict[str, Any]:
        """Become a member: asked once, and first. Seconds are counted from here on."""
        self._began_at = trio.current_time()
        known = {bytes.fromhex(peer): addresses for peer, addresses in peers.items()}
        self._member = await self._stack.enter_async_context(open_member(bytes.fromhex(run), port, known))
        return {"peer": self._member.host.author.hex(), "addresses": self._member.host.addresses}

    async def be_public(self, seconds: float) -> dict[str, Any]:
        """Wait until this node knows that others can dial it, and so relays."""
        reachability = self._member.connectivity.reachability
        with trio.move_on_after(seconds):
            while reachability.kind is not ReachabilityKind.PUBLIC:
                await reachability.changed()
        return {"is_public": reachability.kind is ReachabilityKind.PUBLIC}

    async def meet(self, peer: str, connect_seconds: float, direct_seconds: float) -> dict[str, Any]:
        """Wait for a connection with a peer, whoever makes it, and then for a direct one: when there was either."""
        host, other = self._member.host, bytes.fromhex(peer)
        connected_s = direct_s = None
        with trio.move_on_at(self._began_at + connect_seconds), host.connection_events() as events:
            async for who, is_connected in events:
                if who == other and is_connected:
                    connected_s = trio.current_time() - self._began_at
                    break
        if connected_s is not None:
            with trio.move_on_after(direct_seconds):
                await host.wait_direct(other)
                direct_s = trio.current_time() - self._began_at
        kind = self._member.connectivity.reachability.kind
        return {"connected_s": connected_s, "direct_s": direct_s, "kind": kind}

    async def exchange(self, peer: str, session: str, size: int) -> dict[str, Any]:
        """Exchange random fp32 of so many bytes for the peer's, and take the mean: both ends' must hash alike."""
        host, other = self._member.host, bytes.fromhex(peer)
        was_relayed = host.path(other) == "relayed"
        seed = int.from_bytes(host.author[:8], "big")
        own = np.random.default_rng(seed).standard_normal(size // 4, dtype=np.float32).tobytes()
        received = bytearray(len(own))
        name = bytes.fromhex(session)
        start = StartExchange(name, other, 0, host.author < other, trio.current_time() + EXCHANGE_SECONDS)
        offer = Offer(
            run_id=bytes(32), session=name, stage=0, layout=bytes(32), codec="fp32", size=len(own), round=0, tokens=1
        )
        result = await self._member.exchanges.run(
            start, offer, Outgoing.whole(memoryview(own), blake3(own).digest()), memoryview(received), _Taker()
        )
        mean = (np.frombuffer(own, np.float32) + np.frombuffer(received, np.float32)) / 2
        way = "bulk" if result.path == "bulk" else "relayed stream" if was_relayed else "stream"
        return {
            "committed": result.committed,
            "reason": result.reason,
            "seconds": result.seconds,
            "way": way,
            "path": host.path(other),
            "own": blake3(own).hexdigest(),
            "received": blake3(received).hexdigest(),
            "mean": blake3(mean.tobytes()).hexdigest(),
        }

    async def leave(self) -> dict[str, Any]:
        """Say farewell to the run."""
        await self._member.membership.announcer.announce(left=True)
        await self._member.gossip.flush()
        return {}


class _Taker:
    """Takes whatever comes whole."""

    async def refusal(self, size: int, tokens: int) -> str | None:
        """None."""
        await trio.lowlevel.checkpoint()
        return None


async def serve(control: trio.SocketStream) -> None:
    """Answer requests until the other end closes."""
    async with contextlib.AsyncExitStack() as stack:
        node = NatNode(stack)
        async for request in read_requests(control):
            await send_answer(control, await handle_request(node, request))


def main() -> None:
    """Run one process; its log goes to the error output."""
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s.%(msecs)03d %(name)s %(message)s", datefmt="%X")
    logging.getLogger("farandole").setLevel(logging.DEBUG)
    plain = socket.socket(fileno=int(sys.argv[1]))
    with contextlib.suppress(BrokenPipeError):
        trio.run(serve, trio.SocketStream(trio.socket.from_stdlib_socket(plain)))


if __name__ == "__main__":
    main()
