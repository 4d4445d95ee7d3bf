"""How a node is connected: whether others can dial it, the relays that it has, the relay that it is."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.reachability import Address, ReachabilityKind
from farandole.protocol.records import relay_key
from farandole.protocol.relay import Limits

from ...base.bandwidth import Shaping
from ...base.nurseries import open_service_nursery
from ..mapping.port_mapper import PortKeeper
from .checkup import CheckupService
from .punching import Puncher
from .reachability import Examiner, Reachability
from .relay_server import RelayServer
from .relays import RelayKeeper
from .speed import SpeedService

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ..host import Host

logger = logging.getLogger(__name__)

# A lookup in the DHT that looks for relays, and how often there is one while some are wanted.
FIND_TIMEOUT: Final = 5.0
FIND_INTERVAL: Final = 30.0


class Connectivity:
    """One node's reachability and relays; made by `open_connectivity`."""

    def __init__(
        self,
        host: Host,
        key: Ed25519PrivateKey,
        run_id: bytes,
        shaping: Shaping,
        known: Iterable[bytes] = (),
        limits: Limits | None = None,
        reachability: Reachability | None = None,
        *,
        port_lease: int | None = None,
    ) -> None:
        """``known``: peers that may relay, whose addresses the host has; ``limits``: None to relay for nobody.

        ``port_lease``: for how many seconds at a time the home's router is asked to send on this node's port; None: it
        is not asked.
        """
        self._rng = random.Random()
        self.reachability = reachability or Reachability()
        self.server = RelayServer(host, key, shaping, limits) if limits is not None else None
        self.members: Callable[[], Iterable[bytes]] = tuple
        """Peers of the run, once it is known."""
        self.checkup = CheckupService(host)
        self.speed = SpeedService(host, shaping)
        self._is_given = reachability is not None
        self._host = host
        self._key = relay_key(run_id)
        self._known = frozenset(known)
        self._found_at = -math.inf
        self.keeper = RelayKeeper(host, self.reachability, self._find_relays, self._rng)
        self._ports: PortKeeper | None = None
        if port_lease is not None:
            self._ports = PortKeeper(host, lambda: self._examiner.note_change(), port_lease)
        prepare = self._ports.has_tried.wait if self._ports else trio.lowlevel.checkpoint
        self._examiner = Examiner(host, self.reachability, self._rng, prepare)
        host.observe_port = self._observe_port
        self._puncher = Puncher(host, self._examiner.dialback, self.reachability)

    @property
    def num_reservations(self) -> int:
        """Peers that are reached through this node."""
        return 0 if self.server is None else self.server.num_reservations

    @property
    def num_circuits(self) -> int:
        """Pairs of peers that talk through this node."""
        return 0 if self.server is None else self.server.num_circuits

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            if self._ports is not None:
                nursery.start_soon(self._ports.run)
            if not self._is_given:
                nursery.start_soon(self._examiner.run)
            nursery.start_soon(self.keeper.run)
            nursery.start_soon(self._puncher.run)
            if self.server is not None:
                nursery.start_soon(self._relay_while_public, self.server)

    @asynccontextmanager
    async def _observe_port(self, port: int) -> AsyncIterator[list[Address]]:
        """Peers are asked only where it is known that they see another port than this machine's."""
        listening = [own for _, own in self._host.listening]
        outer = [seen for _, seen in self.reachability.verdict.addresses]
        if self.reachability.kind is not ReachabilityKind.PUNCHABLE or set(outer) <= set(listening):
            yield []
            return
        async with self._examiner.dialback.observed_by_any(port) as seen:
            yield seen

    async def _relay_while_public(self, server: RelayServer) -> None:
        while True:
            while self.reachability.kind is not ReachabilityKind.PUBLIC:
                await self.reachability.changed()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.run)
                nursery.start_soon(self._host.provide, self._key)
                while self.reachability.kind is ReachabilityKind.PUBLIC:
                    await self.reachability.changed()
                nursery.cancel_scope.cancel()
            self._host.withdraw(self._key)

    async def _find_relays(self) -> list[bytes]:
        """Whoever may relay beside those that are connected, first those that say so; the DHT is asked now and then."""
        relays: list[bytes] = []
        if trio.current_time() - self._found_at >= FIND_INTERVAL:
            self._found_at = trio.current_time()
            relays = [peer for peer, _ in await self._host.find_providers(self._key, FIND_TIMEOUT)]
        others = [*self._known, *self.members()]
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
    known: Iterable[bytes] = (),
    limits: Limits | None = None,
    reachability: Reachability | None = None,
    *,
    port_lease: int | None = None,
) -> AsyncIterator[Connectivity]:
    """For as long as the block runs."""
    connectivity = Connectivity(host, key, run_id, shaping, known, limits, reachability, port_lease=port_lease)
    async with open_service_nursery() as nursery:
        nursery.start_soon(connectivity.run)
        yield connectivity
