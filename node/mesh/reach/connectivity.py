"""The connectivity of a node: whether others can dial it, the relays that it uses, and its own relay."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.mesh.kademlia import relay_key
from farandole.protocol.mesh.reachability import Address, ReachabilityKind
from farandole.protocol.mesh.relay import Limits

from ...base.bandwidth import Shaping
from ...base.nurseries import open_service_nursery
from ..host import Host
from ..mapping.port_mapper import PortKeeper
from .clock import tell_time
from .punching import Puncher
from .reachability import Examiner, Reachability
from .relay_server import RelayServer
from .relays import RelayKeeper

logger = logging.getLogger(__name__)

# Timeout of a DHT lookup for relays, and the interval of lookups while relays are wanted.
FIND_TIMEOUT: Final = 5.0
FIND_INTERVAL: Final = 30.0


class Connectivity:
    """One node's reachability and relays; made by `open_connectivity`."""

    def __init__(
        self,
        host: Host,
        run_id: bytes,
        known: Collection[bytes],
        reachability: Reachability,
        server: RelayServer | None,
    ) -> None:
        self.reachability = reachability
        self._members: frozenset[bytes] = frozenset()
        self._server = server
        self._host = host
        self._key = relay_key(run_id)
        self._known = known
        self._rng = random.Random()
        self._found_at = -math.inf
        self.keeper = RelayKeeper(host, reachability, self._find_relays, self._rng)
        self.examiner = Examiner(host, reachability, self._rng)
        self.puncher = Puncher(host, self.examiner.dialback, reachability)

    @property
    def members(self) -> frozenset[bytes]:
        """Live members of the run, as last set: they may relay, and are relayed for."""
        return self._members

    @members.setter
    def members(self, members: frozenset[bytes]) -> None:
        self._members = members
        if self._server is not None:
            self._server.members = members

    @property
    def num_reservations(self) -> int:
        """The number of peers that are reached through this node."""
        return 0 if self._server is None else self._server.table.num_reservations

    @property
    def num_circuits(self) -> int:
        """The number of pairs of peers that are connected through this node."""
        return 0 if self._server is None else self._server.table.num_circuits

    def is_out_of_reach(self, peer: bytes) -> bool:
        """Return whether attempts have shown that a peer is reachable only through relays."""
        return self.puncher.is_out_of_reach(peer)

    @asynccontextmanager
    async def observe_port(self, port: int) -> AsyncIterator[list[Address]]:
        """Yield a port's outer addresses as peers see them, while the block runs; empty if the router keeps ports.

        Peers are asked only if it is known that they see another port than this machine's.
        """
        listening = [own for _, own in self._host.own.listening]
        outer = [seen for _, seen in self.reachability.verdict.addresses]
        if self.reachability.kind is not ReachabilityKind.PUNCHABLE or set(outer) <= set(listening):
            yield []
            return
        async with self.examiner.dialback.observed_by_any(port) as seen:
            yield seen

    async def relay_while_public(self, server: RelayServer) -> None:
        """Relay for others while they can dial this node, until cancelled."""
        while True:
            while self.reachability.kind is not ReachabilityKind.PUBLIC:
                await self.reachability.changed()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.run)
                nursery.start_soon(self._host.dht.provide, self._key)
                while self.reachability.kind is ReachabilityKind.PUBLIC:
                    await self.reachability.changed()
                nursery.cancel_scope.cancel()
            self._host.dht.withdraw(self._key)

    async def _find_relays(self) -> list[bytes]:
        """Return unconnected peers that may relay, announced relays first; looks them up in the DHT now and then."""
        relays: list[bytes] = []
        if trio.current_time() - self._found_at >= FIND_INTERVAL:
            self._found_at = trio.current_time()
            relays = [peer for peer, _ in await self._host.dht.find_providers(self._key, FIND_TIMEOUT)]
        others = [*self._known, *self.members]
        for peers in (relays, others):
            self._rng.shuffle(peers)
        left_out = {self._host.author, *self._host.connected}
        return [peer for peer in (*relays, *others) if peer not in left_out]


@asynccontextmanager
async def open_connectivity(
    host: Host,
    key: Ed25519PrivateKey,
    run_id: bytes,
    shaping: Shaping,
    known: Collection[bytes] = (),
    limits: Limits | None = None,
    reachability: Reachability | None = None,
    *,
    port_lease: int | None = None,
) -> AsyncIterator[Connectivity]:
    """Find out how others reach the host, and keep it reachable, for as long as the block runs.

    ``known``: peers that may relay, whose addresses the host has; ``limits``: None to relay for no peer;
    ``reachability``: given if it is known and need not be examined; ``port_lease``: seconds of each lease for which the
    home's router is asked to forward this node's port; None: it is not asked.
    """
    server = None if limits is None else RelayServer(host, key, shaping, limits)
    connectivity = Connectivity(host, run_id, known, reachability or Reachability(), server)
    tell_time(host)
    async with open_service_nursery() as nursery:
        prepare = trio.lowlevel.checkpoint
        if port_lease is not None:
            ports = PortKeeper(host, connectivity.examiner.note_change, port_lease)
            prepare = ports.has_tried.wait
            nursery.start_soon(ports.run)
        if reachability is None:
            nursery.start_soon(connectivity.examiner.run, prepare)
        nursery.start_soon(connectivity.keeper.run)
        nursery.start_soon(connectivity.puncher.run)
        if server is not None:
            nursery.start_soon(connectivity.relay_while_public, server)
        yield connectivity
