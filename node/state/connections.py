"""Connections with members of the run: a few are kept, broken ones are investigated, and unfit releases are named.

Members that were only heard of are dialled, at random and a few at a time, until this node has reached as many as it
needs for its decisions (`TARGET_REACHED`). An unreachable one is retried at increasing intervals, so keys that no node
answers for cost a bounded number of dials.

A peer whose connection breaks, and that cannot be dialled again, is taken for dead until its heartbeat advances. So a
killed process leaves the live set of its neighbours within one dial, not within three heartbeats.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final

import trio

from farandole.protocol.run.releases import ReleaseConflict, Standing, is_incomplete, standing
from farandole.protocol.state.liveness import Liveness
from farandole.protocol.wire.bounds import Backoff
from farandole.protocol.wire.identity import short_name

from ..base.causes import release_words
from ..base.errors import PeerUnreachableError
from ..base.project import VERSION
from ..base.streams import SUSPICION_DIAL_TIMEOUT
from ..mesh.host import Host
from ..status.journal import Journal
from .membership import Membership

# Members that a node keeps connections with: enough that no partition of a few cuts it off, few enough for a home
# router. Exchanges dial their partners in addition to these.
TARGET_CONNECTIONS = 12
KEEP_INTERVAL = 5.0
# Members that a node dials in order to have reached them; in a larger run, others reach it as well. Pairs that are
# drawn in a random graph of this degree mix nearly as in a complete one, and a median of this many values is off by
# few.
TARGET_REACHED = 32
# Parallel dials. And seconds until an absent peer is dialled again, doubled after each further failure, up to a limit.
MAX_DIALS = 16
FIRST_PAUSE, MAX_PAUSE = 5.0, 600.0
# A peer whose connection broke is dialled once more before it is taken for dead. In a large run it may have had many
# connections: all nodes together dial it about this often a second, which costs it a fifth of its time.
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
        self._backoff = Backoff(FIRST_PAUSE, MAX_PAUSE)

    async def run(self) -> None:
        """Keep connections until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_connected)
            async for peer, is_connected in self._host.connections.events():
                if is_connected:
                    self._liveness.trust(peer)
                elif peer in self._membership.everyone:
                    nursery.start_soon(self._probe, peer)

    async def _keep_connected(self) -> None:
        """Dial the peers that are due, again and again."""
        while True:
            connected, now = self._host.connected, trio.current_time()
            everyone, reached = self._membership.everyone, self._membership.reached
            due = {peer for peer in everyone - connected if self._backoff.is_due(peer, now)}
            num_wanted = max(0, min(TARGET_CONNECTIONS, len(reached)) - len(connected & reached))
            num_new = min(MAX_DIALS, max(0, TARGET_REACHED - len(reached)))
            async with trio.open_nursery() as nursery:
                for peer in (*self._sample(due & reached, num_wanted), *self._sample(due - reached, num_new)):
                    nursery.start_soon(self._try_connect, peer)
            await trio.sleep(KEEP_INTERVAL * random.uniform(0.5, 1.5))

    def _sample(self, peers: frozenset[bytes] | set[bytes], most: int) -> list[bytes]:
        return random.sample(sorted(peers), min(most, len(peers)))

    async def _try_connect(self, peer: bytes) -> bool:
        try:
            await self._host.connect(peer, timeout=SUSPICION_DIAL_TIMEOUT)
        except PeerUnreachableError:
            self._backoff.note_failure(peer, trio.current_time())
            return False
        self._backoff.note_success(peer)
        self._liveness.trust(peer)
        return True

    async def _probe(self, peer: bytes) -> None:
        """Find out whether a broken connection to a live peer is the line's fault, or the peer is gone."""
        await trio.sleep(random.uniform(0, len(self._membership.everyone) / PROBES_PER_SECOND))
        if not await self._try_connect(peer):
            self._liveness.suspect(peer, trio.current_time())
            self._on_lost(peer)
            self._membership.refresh()


LOOK_INTERVAL: Final = 2.0
# A peer that connects while it starts serves few protocols yet. It is asked again, after this number of looks; a relay
# or a visitor never serves them.
LOOKS_PER_ASK: Final = 10
# Peers named in the log.
MAX_NAMED: Final = 8


class ReleaseWatch:
    """The connected peers whose release does not fit this node's: they are named, once, with the remedy.

    Without it they would look gone: their entries do not come, or each exchange with them fails. ``needed``: the
    protocols that averaging needs.
    """

    def __init__(self, host: Host, journal: Journal, needed: Sequence[str]) -> None:
        self.apart: dict[bytes, Standing] = {}
        """Peers that this node cannot average with."""
        self._host = host
        self._journal = journal
        self._needed = needed
        self._warned: set[Standing] = set()

    async def run(self) -> None:
        """Look at the connected peers until cancelled, and ask the ones again that serve few protocols yet."""
        while True:
            for _ in range(LOOKS_PER_ASK):
                self.look()
                await trio.sleep(LOOK_INTERVAL)
            async with trio.open_nursery() as nursery:
                for peer in self._host.connected:
                    if is_incomplete(self._host.identify.software.get(peer), self._needed):
                        nursery.start_soon(self._host.identify.ask, peer)

    def look(self) -> ReleaseConflict:
        """Judge what the connected peers have said; warn once of older ones and once of newer ones."""
        known = {peer: self._host.identify.software.get(peer) for peer in sorted(self._host.connected)}
        own = self._host.handlers.protocols
        self.apart = {
            peer: found
            for peer, theirs in known.items()
            if theirs is not None and (found := standing(own, theirs, self._needed)) is not None
        }
        versions: dict[Standing, list[str]] = {"older": [], "newer": []}
        for peer, found in self.apart.items():
            theirs = known[peer]
            versions[found].append(theirs.version if theirs is not None else "")
        conflict = ReleaseConflict(tuple(versions["older"]), tuple(versions["newer"]))
        self._journal.update(release_conflict=conflict or None)
        if not conflict:
            self._journal.over("releases")
        if fresh := set(self.apart.values()) - self._warned:
            self._warned |= fresh
            self._journal.warn(": ".join(release_words(conflict, VERSION)), "releases")
            names = ", ".join(short_name(peer) for peer in list(self.apart)[:MAX_NAMED])
            self._journal.say(f"their names here: {names}")
        return conflict
