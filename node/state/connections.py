"""Connections with members of the run: a few are kept at all times, and one that breaks is looked into.

A peer whose connection breaks, and that cannot be dialled again, is taken for dead until its heartbeat advances: so a
killed process leaves the live set of its neighbours within a dial, not within three heartbeats.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import trio

from farandole.protocol.liveness import Liveness

from ..base.errors import PeerUnreachableError
from ..mesh.host import Host
from .membership import Membership

# Members that a node keeps connections with: enough that no partition of a few cuts it off, few enough for a home
# router. Exchanges dial whom they need beside these.
TARGET_CONNECTIONS = 12
KEEP_INTERVAL = 5.0
# A peer whose connection broke is dialled once more before it is taken for dead. In a large run it may have had many
# connections: all together dial it about so often a second, which costs it a fifth of its time.
SUSPICION_DIAL_TIMEOUT = 3.0
PROBES_PER_SECOND = 100.0


class ConnectionKeeper:
    """Keeps connections with live members. ``on_lost`` is called with each peer that could not be reached again."""

    def __init__(
        self, host: Host, membership: Membership, liveness: Liveness, on_lost: Callable[[bytes], None]
    ) -> None:
        self._host = host
        self._membership = membership
        self._liveness = liveness
        self._on_lost = on_lost
        self._rng = random.Random()

    async def run(self) -> None:
        """Keep them until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_connected)
            with self._host.connection_events() as events:
                async for peer, is_connected in events:
                    if is_connected:
                        self._liveness.trust(peer)
                    elif peer in self._membership.everyone:
                        nursery.start_soon(self._probe, peer)

    async def _keep_connected(self) -> None:
        while True:
            await trio.sleep(KEEP_INTERVAL * self._rng.uniform(0.5, 1.5))
            connected, everyone = self._host.connected, self._membership.everyone
            missing = [peer for peer in everyone if peer not in connected]
            wanted = min(TARGET_CONNECTIONS, len(everyone)) - len(connected & everyone)
            if wanted <= 0:
                continue
            async with trio.open_nursery() as nursery:
                for peer in self._rng.sample(missing, min(wanted, len(missing))):
                    nursery.start_soon(self._try_connect, peer)

    async def _try_connect(self, peer: bytes) -> bool:
        try:
            await self._host.connect(peer, timeout=SUSPICION_DIAL_TIMEOUT)
        except PeerUnreachableError:
            return False
        return True

    async def _probe(self, peer: bytes) -> None:
        """The connection to a live peer broke: find out whether it is the line, or the peer."""
        await trio.sleep(self._rng.uniform(0, len(self._membership.everyone) / PROBES_PER_SECOND))
        if not await self._try_connect(peer):
            self._liveness.suspect(peer, trio.current_time())
            self._on_lost(peer)
            self._membership.refresh()
