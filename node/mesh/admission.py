"""Admission of strangers: where they come from, which may come in after a flood, and whose handshake goes on next.

A handshake costs this node about 2 ms, and a stranger next to nothing. Each pass of the event loop processes a few
steps of unauthenticated handshakes, round-robin over the addresses: a flood from one address delays neither the others
nor connected peers.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict, deque
from typing import Final, NamedTuple

import trio

from farandole.protocol.wire.latest import Latest

# Steps of handshakes in one pass of the event loop: each takes up to 1 ms, which is how long everything else waits.
STEPS_PER_PASS: Final = 2
# A peer that floods is shut out, and can come back under another key at no cost. So after a flood, one stranger from
# the same network is let in per `STRANGER_SECONDS`, for `AFTERMATH_SECONDS`. What a peer may send before it is a flood
# costs this node up to 0.6 s: 6 % of a core. A network may hold many homes, whose strangers wait during this time, or
# find no room while the flood lasts: so it applies to internet networks, not to this machine's own and its neighbours.
STRANGER_SECONDS: Final = 10.0
AFTERMATH_SECONDS: Final = 600.0
# Flooded networks that are remembered, the latest ones.
MAX_FLOODED: Final = 1_024


class Site(NamedTuple):
    """The origin of a connection."""

    network: str
    """The block that one stranger may own: an IPv4 /24, an IPv6 /48."""
    address: str
    """An IPv4 address, or an IPv6 /64 (one customer has 2^64 addresses)."""

    @property
    def is_global(self) -> bool:
        """Return whether this is a public address: not this machine's, a local network's, or unknown."""
        return bool(self.address) and ipaddress.ip_network(self.address).is_global


def site_of(host: str) -> Site:
    """Return the site of an IP address; all invalid addresses share one site."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return Site("", "")
    widths = (24, 32) if address.version == 4 else (48, 64)
    network, narrow = (ipaddress.ip_network((address, width), strict=False) for width in widths)
    return Site(str(network), str(narrow))


class FloodedNetworks:
    """The networks from which floods came. Times are in seconds, of any monotonic clock."""

    def __init__(self) -> None:
        self._flooded = Latest[str, tuple[float, float]](MAX_FLOODED)
        """Network -> until when strangers have to wait there, and when the next one may come in."""

    def note(self, site: Site, now: float) -> None:
        """Note that a peer at this site has flooded this node."""
        if site.is_global:
            _, next_at = self._flooded.get(site.network, (0.0, now + STRANGER_SECONDS))
            self._flooded[site.network] = now + AFTERMATH_SECONDS, next_at

    def lets_in(self, site: Site, now: float) -> bool:
        """Return whether a stranger from this site may come in now; if so, the next one has to wait."""
        until, next_at = self._flooded.get(site.network, (0.0, 0.0))
        if until <= now:
            return True
        if next_at > now:
            return False
        self._flooded[site.network] = until, now + STRANGER_SECONDS
        return True


class Turns:
    """Lets handshakes go on, `STEPS_PER_PASS` in each pass of the event loop, round-robin over the addresses."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Site, deque[trio.Event]] = OrderedDict()
        self._work = trio.Event()

    async def take(self, site: Site) -> None:
        """Wait for this site's turn."""
        turn = trio.Event()
        self._waiting.setdefault(site, deque()).append(turn)
        self._work.set()
        await turn.wait()

    async def run(self) -> None:
        """Grant turns until cancelled. A waiter that was cancelled still uses up its turn."""
        while True:
            for _ in range(STEPS_PER_PASS):
                if not self._waiting:
                    break
                site, turns = self._waiting.popitem(last=False)
                turns.popleft().set()
                if turns:
                    self._waiting[site] = turns
            if not self._waiting:
                self._work = trio.Event()
                await self._work.wait()
            await trio.lowlevel.checkpoint()
