"""Who may begin a handshake, and whose goes on: strangers compete here, and each for itself.

A handshake costs this node about 2 ms, and a stranger next to nothing. So unfinished ones are few, and when there are
too many, the one makes room that has kept us waiting for longest, at the address, and in the network, that has most.
Refusing newcomers instead would let anybody with enough silent sockets keep everybody out. Where nobody keeps us
waiting, we are the ones who are slow: then the newcomer is refused, since making room would only let nobody finish.

What is read before authentication is taken up a few steps a pass of the event loop, the addresses by turns: a flood
from one delays neither the others nor the peers that are connected.
"""

from __future__ import annotations

import ipaddress
import math
from collections import Counter, OrderedDict, deque
from typing import Final, NamedTuple, Protocol

import trio

# Unfinished inbound handshakes by address and in all. Behind one address may sit many honest peers (carrier NAT, a
# laboratory), but few dial in the same second. A task, a socket and 600 bytes each.
MAX_HANDSHAKES_PER_ADDRESS: Final = 64
MAX_HANDSHAKES: Final = 256
# Steps of handshakes in one pass of the event loop: each takes up to 1 ms, which is how long everything else waits.
STEPS_PER_PASS: Final = 2
# A peer that floods is kept out, and comes back under another key, at no cost. So after a flood strangers from the same
# network are let in one in so many seconds, for so long. What a peer may send until it is a flood takes this node up to
# 0.6 s: 6 % of a core. Behind one network may be many homes, whose strangers wait meanwhile, or find no room while the
# flood lasts: so this holds for networks of the internet, and not for this machine's own and its neighbours.
STRANGER_SECONDS: Final = 10.0
AFTERMATH_SECONDS: Final = 600.0
# Networks that are remembered, those of the last floods.
MAX_FLOODED: Final = 1_024


class Site(NamedTuple):
    """Where a connection comes from."""

    network: str
    """What one stranger may have whole: an IPv4 /24, an IPv6 /48."""
    address: str
    """An IPv4 address, or an IPv6 /64 (one customer has 2^64 addresses)."""

    @property
    def is_global(self) -> bool:
        """Whether it is one of the internet's, and not of this machine, of a local network, or unknown."""
        return bool(self.address) and ipaddress.ip_network(self.address).is_global


def site_of(host: str) -> Site:
    """The site of an IP address; of one that is none, the site of all such."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return Site("", "")
    widths = (24, 32) if address.version == 4 else (48, 64)
    network, narrow = (ipaddress.ip_network((address, width), strict=False) for width in widths)
    return Site(str(network), str(narrow))


class Pending(Protocol):
    """The socket of an unfinished handshake."""

    site: Site
    waiting_since: float
    """When we began to wait for the other end's next bytes (`trio.current_time`); infinity while it waits for us."""

    def abort(self) -> None:
        """Close it at once."""


class Handshakes:
    """Unfinished inbound handshakes."""

    def __init__(self) -> None:
        self._pending: set[Pending] = set()

    def __len__(self) -> int:
        return len(self._pending)

    def make_room(self, site: Site) -> bool:
        """Whether a newcomer from there may begin; another may be closed for it."""
        neighbours = [pending for pending in self._pending if pending.site.address == site.address]
        if len(neighbours) >= MAX_HANDSHAKES_PER_ADDRESS:
            return self._drop_slowest(neighbours)
        if len(self._pending) < MAX_HANDSHAKES:
            return True
        networks = Counter(pending.site.network for pending in self._pending)
        busiest = max(networks, key=lambda network: (networks[network], network == site.network))
        crowd = [pending for pending in self._pending if pending.site.network == busiest]
        address, _ = Counter(pending.site.address for pending in crowd).most_common(1)[0]
        crowd = [pending for pending in crowd if pending.site.address == address]
        if self._drop_slowest(crowd):
            return True
        if busiest != site.network:
            self._drop(crowd[-1])
        return busiest != site.network

    def add(self, pending: Pending) -> None:
        """One begins."""
        self._pending.add(pending)

    def remove(self, pending: Pending) -> None:
        """One is over."""
        self._pending.discard(pending)

    def _drop_slowest(self, crowd: list[Pending]) -> bool:
        slowest = min(crowd, key=lambda pending: pending.waiting_since)
        if slowest.waiting_since == math.inf:
            return False
        self._drop(slowest)
        return True

    def _drop(self, pending: Pending) -> None:
        self._pending.discard(pending)
        pending.abort()


class FloodedNetworks:
    """Where floods came from. Times are in seconds, of any monotonic clock."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._next_at: dict[str, float] = {}

    def note(self, site: Site, now: float) -> None:
        """A peer there has flooded."""
        if not site.is_global:
            return
        self._until.pop(site.network, None)
        self._until[site.network] = now + AFTERMATH_SECONDS
        self._next_at.setdefault(site.network, now + STRANGER_SECONDS)
        if len(self._until) > MAX_FLOODED:
            oldest = next(iter(self._until))
            del self._until[oldest], self._next_at[oldest]

    def lets_in(self, site: Site, now: float) -> bool:
        """Whether a stranger from there may come in; the next one may only later."""
        if self._until.get(site.network, 0.0) <= now:
            return True
        if self._next_at[site.network] > now:
            return False
        self._next_at[site.network] = now + STRANGER_SECONDS
        return True


class Turns:
    """Lets handshakes go on, `STEPS_PER_PASS` at a time, the addresses by turns."""

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
        """Until cancelled. Who has stopped waiting wastes a turn."""
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
