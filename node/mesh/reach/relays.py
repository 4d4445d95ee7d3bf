"""Keeps a node reachable that others cannot dial: holds reservations with two relays, and replaces lost ones.

Candidates are connected peers, former relays, peers that the DHT lists as relays of the run, and its members; none is
built in. Whether a peer relays is found out by asking it, which costs a round trip, and a peer that has refused is left
alone for a while.
"""

from __future__ import annotations

import logging
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import trio

from farandole.protocol.mesh.reachability import is_global
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.identity import short_name

from ...base.backoff import Backoff, pauses
from ...base.errors import PeerUnreachableError
from ..host import Host
from ..relay_client import Reservation
from .reachability import Reachability, announced

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
# The same while fewer than `NUM_RELAYS` are held; grows up to `CHECK_INTERVAL` while no peer relays.
HURRY_INTERVAL: Final = 2.0
# Peers asked at once for each free place.
NUM_ASKED: Final = 3
# Unconnected peers asked in one check: in a run of a thousand of which few relay, it would otherwise dial all of them.
MAX_STRANGERS: Final = 12
# Former relays, which are asked again when all connections are gone: a router that restarts loses the node nothing.
MAX_FORMER: Final = 8

FindRelays = Callable[[], Awaitable[list[bytes]]]


class RelayKeeper:
    """Holds the reservations of one host, and publishes their addresses."""

    def __init__(self, host: Host, reachability: Reachability, find: FindRelays, rng: random.Random) -> None:
        """``find``: returns unconnected peers that may relay, the likeliest first; their addresses are known."""
        self._host = host
        self._reachability = reachability
        self._find = find
        self._rng = rng
        self._backoff = Backoff(FIRST_RETRY_AFTER, MAX_RETRY_AFTER)
        self._held: set[bytes] = set()
        self._former: OrderedDict[bytes, None] = OrderedDict()  # the latest last
        host.connections.protect(self._held.__contains__)

    @property
    def held(self) -> list[Reservation]:
        """The valid reservations."""
        return [held for held in self._host.relays.reservations if held.relay in self._held]

    async def run(self) -> None:
        """Hold reservations while the node needs relays, until cancelled."""
        hurry = pauses(HURRY_INTERVAL, CHECK_INTERVAL, self._rng)
        while True:
            if self._reachability.needs_relays:
                await self._keep()
            else:
                self._give_up()
            self._announce()
            if self._reachability.needs_relays and len(self.held) < NUM_RELAYS:
                await self._wait(next(hurry))
            else:
                hurry = pauses(HURRY_INTERVAL, CHECK_INTERVAL, self._rng)
                await self._wait(CHECK_INTERVAL)

    async def _wait(self, seconds: float) -> None:
        """Wait for ``seconds``, or until a relay is lost or the node's reachability has changed."""
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:

                async def end_when(wait: Callable[[], Awaitable[None]]) -> None:
                    await wait()
                    nursery.cancel_scope.cancel()

                nursery.start_soon(end_when, self._reachability.changed)
                nursery.start_soon(end_when, self._loss)

    async def _loss(self) -> None:
        """Wait until a relay in use is gone."""
        with self._host.connections.events() as events:
            async for peer, is_connected in events:
                if not is_connected and peer in self._held:
                    return

    async def _keep(self) -> None:
        soon = trio.current_time() + RENEW_BEFORE
        self._held.intersection_update(held.relay for held in self._host.relays.reservations)
        async with trio.open_nursery() as nursery:
            for held in self.held:
                if held.expires_at < soon:
                    nursery.start_soon(self._reserve, held.relay)
        if len(self._held) < NUM_RELAYS:
            connected = self._due([peer for peer in self._host.connected if self._host.connections.is_direct(peer)])
            self._rng.shuffle(connected)
            await self._ask_some(connected)
        if len(self._held) < NUM_RELAYS:
            found = sorted(await self._find(), key=lambda peer: self._backoff.has_failed(peer, ()))
            await self._ask_some(self._due([*self._former, *found])[:MAX_STRANGERS])

    def _due(self, peers: Iterable[bytes]) -> list[bytes]:
        """Return the peers that may be asked now, in the same order, each once."""
        now = trio.current_time()
        return [peer for peer in dict.fromkeys(peers) if peer not in self._held and self._backoff.is_due(peer, (), now)]

    async def _ask_some(self, peers: list[bytes]) -> None:
        asked = sorted(peers, key=lambda peer: not self._is_far(peer))
        while asked and len(self._held) < NUM_RELAYS:
            batch, asked = asked[:NUM_ASKED], asked[NUM_ASKED:]
            async with trio.open_nursery() as nursery:
                for peer in batch:
                    nursery.start_soon(self._reserve, peer)

    async def _reserve(self, relay: bytes) -> None:
        try:
            await self._host.relays.reserve(relay)
        except (PeerUnreachableError, RemoteProtocolError) as error:
            logger.debug("no relay: %s", error)
            self._backoff.note_failure(relay, (), trio.current_time())
            return
        self._backoff.note_success(relay)
        if relay in self._held or len(self._held) < NUM_RELAYS:
            if relay not in self._held:
                logger.info("reachable through the relay %s", short_name(relay))
            self._held.add(relay)
            self._announce()  # the other requests may take their time
            self._former[relay] = None
            self._former.move_to_end(relay)
            if len(self._former) > MAX_FORMER:
                self._former.popitem(last=False)
        else:
            self._host.relays.forget(relay)

    def _is_far(self, peer: bytes) -> bool:
        """Return whether others on the internet could dial the peer, judging by our own connections to it."""
        addresses = [a.split("/") for a in (*self._host.remote_addresses(peer), *self._host.dialler.known.of(peer))]
        return any(is_global(parts[2]) for parts in addresses if len(parts) > 2)

    def _give_up(self) -> None:
        for relay in self._held:
            self._host.relays.forget(relay)
        self._held.clear()

    def _announce(self) -> None:
        through = [held.address for held in self.held]
        self._host.own.external = [*announced(self._reachability.verdict), *through]
