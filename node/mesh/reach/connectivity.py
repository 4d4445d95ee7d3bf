"""The connectivity of a node: whether others can dial it, the relays that it uses, and its own relay."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from typing import Final

import trio

from farandole.protocol.mesh.dialling import Address
from farandole.protocol.mesh.kademlia import relay_key
from farandole.protocol.mesh.reachability import ReachabilityKind, is_global
from farandole.protocol.mesh.relay import Limits
from farandole.protocol.wire.identity import short_name
from farandole.protocol.wire.latest import Latest

from ...base.backoff import Backoff
from ...base.bandwidth import Shaping
from ...base.errors import PeerUnreachableError
from ...base.nurseries import open_service_nursery
from ..addresses import direct_ips, multiaddr_of
from ..host import Host
from .punching import Puncher
from .reachability import Examiner, Reachability, tell_time
from .relay_server import RelayServer
from .upnp import keep_ports

logger = logging.getLogger(__name__)

# While one is being replaced, the other serves.
NUM_RELAYS: Final = 2
# Renewal starts this number of seconds before a reservation ends, which leaves time for several tries.
RENEW_BEFORE: Final = 300.0
# A relay that refused is full. A peer that does not relay answers at once that it does not speak the protocol; it may
# relay soon, if all nodes have started at the same time.
FIRST_RETRY_AFTER, MAX_RETRY_AFTER = 4.0, 600.0
# Between two checks of the reservations, in addition to checks after a lost connection.
CHECK_INTERVAL: Final = 15.0
# The same while fewer than `NUM_RELAYS` are held; a peer that refused is left alone for longer.
HURRY_INTERVAL: Final = 2.0
# Peers asked at once for each free place.
NUM_ASKED: Final = 3
# Unconnected peers asked in one check: in a run of a thousand of which few relay, it would otherwise dial all of them.
MAX_STRANGERS: Final = 12
# Former relays, which are asked again when all connections are gone: a router that restarts loses the node nothing.
MAX_FORMER: Final = 8

# Timeout of a DHT lookup for relays, and the interval of lookups while relays are wanted.
FIND_TIMEOUT: Final = 5.0
FIND_INTERVAL: Final = 30.0


class RelayKeeper:
    """Keeps a node reachable that others cannot dial: holds reservations with two relays, and replaces lost ones.

    Candidates are connected peers, former relays, peers that the DHT lists as relays of the run, and its members; none
    is built in. Whether a peer relays is found out by asking it, which costs a round trip, and a peer that has refused
    is left alone for a while. The addresses through the relays are published.
    """

    def __init__(self, host: Host, reachability: Reachability, key: bytes, known: Collection[bytes] = ()) -> None:
        """``key``: of the run's relays in the DHT; ``known``: peers that may relay, whose addresses the host has."""
        self._host = host
        self._reachability = reachability
        self._key = key
        self._known = known
        self._rng = random.Random()
        self._found_at = -math.inf
        self._backoff = Backoff(FIRST_RETRY_AFTER, MAX_RETRY_AFTER)
        self._former = Latest[bytes, None](MAX_FORMER)

    @property
    def _are_missing(self) -> bool:
        return len(self._host.relays.reservations) < NUM_RELAYS

    async def run(self) -> None:
        """Hold reservations while the node needs relays, until cancelled."""
        while True:
            if self._reachability.needs_relays:
                await self._keep()
            else:
                for held in self._host.relays.reservations:
                    self._host.relays.forget(held.relay)
            self._announce()
            is_hurried = self._reachability.needs_relays and self._are_missing
            await self._wait(HURRY_INTERVAL if is_hurried else CHECK_INTERVAL)

    async def _wait(self, seconds: float) -> None:
        """Wait for ``seconds``, or until a relay is lost or the node's reachability has changed."""

        async def end_at_change() -> None:
            await self._reachability.changed()
            waiting.cancel()

        with trio.move_on_after(seconds) as waiting:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(end_at_change)
                async for peer, is_connected in self._host.connections.events():
                    if not is_connected and self._host.relays.holds(peer):
                        waiting.cancel()

    async def _keep(self) -> None:
        soon = trio.current_time() + RENEW_BEFORE
        async with trio.open_nursery() as nursery:
            for held in self._host.relays.reservations:
                if held.expires_at < soon:
                    nursery.start_soon(self._reserve, held.relay)
        if self._are_missing:
            connected = [peer for peer in self._host.connected if self._host.connections.is_direct(peer)]
            self._rng.shuffle(connected)
            await self._ask_some(self._due(connected))
        if self._are_missing:
            found = sorted(await self._find(), key=lambda peer: self._backoff.has_failed(peer, ()))
            await self._ask_some(self._due([*self._former, *found])[:MAX_STRANGERS])

    async def _find(self) -> list[bytes]:
        """Return unconnected peers that may relay, announced relays first; looks them up in the DHT now and then."""
        relays: list[bytes] = []
        if trio.current_time() - self._found_at >= FIND_INTERVAL:
            self._found_at = trio.current_time()
            relays = [peer for peer, _ in await self._host.dht.find_providers(self._key, FIND_TIMEOUT)]
        others = [*self._known, *(self._host.relays.members or ())]
        for peers in (relays, others):
            self._rng.shuffle(peers)
        left_out = {self._host.author, *self._host.connected}
        return [peer for peer in (*relays, *others) if peer not in left_out]

    def _due(self, peers: Iterable[bytes]) -> list[bytes]:
        """Return the peers that may be asked now, in the same order, each once."""
        now, holds = trio.current_time(), self._host.relays.holds
        return [peer for peer in dict.fromkeys(peers) if not holds(peer) and self._backoff.is_due(peer, (), now)]

    async def _ask_some(self, peers: list[bytes]) -> None:
        def is_far(peer: bytes) -> bool:
            """Return whether others on the internet could dial the peer, judging by our own connections to it."""
            addresses = (*self._host.connections.remote_addresses(peer), *self._host.dialler.known.of(peer))
            return any(map(is_global, direct_ips(addresses)))

        asked = sorted(peers, key=is_far, reverse=True)
        while asked and self._are_missing:
            batch, asked = asked[:NUM_ASKED], asked[NUM_ASKED:]
            async with trio.open_nursery() as nursery:
                for peer in batch:
                    nursery.start_soon(self._reserve, peer)

    async def _reserve(self, relay: bytes) -> None:
        is_renewal = self._host.relays.holds(relay)
        try:
            await self._host.relays.reserve(relay)
        except PeerUnreachableError as error:
            logger.debug("no relay: %s", error)
            self._backoff.note_failure(relay, (), trio.current_time())
            return
        self._backoff.note_success(relay)
        if len(self._host.relays.reservations) > NUM_RELAYS:  # others were asked at once, and have agreed before
            self._host.relays.forget(relay)
            return
        if not is_renewal:
            logger.info("reachable through the relay %s", short_name(relay))
        self._announce()  # the other requests may take their time
        self._former[relay] = None

    def _announce(self) -> None:
        verdict, through = self._reachability.verdict, [held.address for held in self._host.relays.reservations]
        public = verdict.addresses if verdict.kind is ReachabilityKind.PUBLIC else ()
        self._host.own.external = [*(multiaddr_of(*address) for address in public), *through]


class Connectivity:
    """One node's reachability and its own relay; made by `open_connectivity`."""

    def __init__(self, host: Host, reachability: Reachability, server: RelayServer) -> None:
        self.reachability = reachability
        self.examiner = Examiner(host, reachability)
        self.puncher = Puncher(host, self.examiner.dialback, reachability)
        self.server = server
        self._host = host

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

    async def relay_while_public(self, key: bytes) -> None:
        """Relay for others while they can dial this node, until cancelled; ``key``: of the run's relays in the DHT."""
        while True:
            while self.reachability.kind is not ReachabilityKind.PUBLIC:
                await self.reachability.changed()
            async with open_service_nursery() as nursery:
                nursery.start_soon(self.server.run)
                nursery.start_soon(self._host.dht.provide, key)
                while self.reachability.kind is ReachabilityKind.PUBLIC:
                    await self.reachability.changed()
            self._host.dht.withdraw(key)


@asynccontextmanager
async def open_connectivity(
    host: Host,
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
    reached = reachability or Reachability()
    connectivity = Connectivity(host, reached, RelayServer(host, shaping, limits))
    tell_time(host)
    async with open_service_nursery() as nursery:
        has_tried = trio.Event()
        if port_lease is None:
            has_tried.set()
        else:
            nursery.start_soon(keep_ports, host, connectivity.examiner.note_change, port_lease, has_tried)
        if reachability is None:
            nursery.start_soon(connectivity.examiner.run, has_tried.wait)
        nursery.start_soon(RelayKeeper(host, reached, relay_key(run_id), known).run)
        nursery.start_soon(connectivity.puncher.run)
        if limits is not None:
            nursery.start_soon(connectivity.relay_while_public, relay_key(run_id))
        yield connectivity
