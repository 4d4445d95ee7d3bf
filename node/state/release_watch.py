"""Watches the releases of connected peers: members that this node cannot average with are named, once, with the remedy.

Without it they would look gone: their entries do not come, or each exchange with them fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import trio

from farandole.protocol.run.releases import ReleaseConflict, Software, Standing, is_incomplete, standing
from farandole.protocol.wire.identity import short_name

from ..base.project import VERSION
from ..base.remedies import release_words
from ..status.journal import Journal

LOOK_INTERVAL: Final = 2.0
# A peer that connects while it starts serves few protocols yet. It is asked again, ever more rarely: a relay or a
# visitor never serves them.
FIRST_ASK_PAUSE, MAX_ASK_PAUSE = 4.0, 300.0
# Peers named in the log.
MAX_NAMED: Final = 8


class SoftwareHost(Protocol):
    """The part of a host that is used here."""

    @property
    def connected(self) -> frozenset[bytes]:
        """Return the peers with a connection."""

    @property
    def protocols(self) -> list[str]:
        """Return the protocols that this node serves."""

    def software_of(self, peer: bytes) -> Software | None:
        """Return what a connected peer runs; None if it has not said."""

    async def identify(self, peer: bytes) -> None:
        """Ask a connected peer what it runs."""


class ReleaseWatch:
    """The connected peers whose release does not fit this node's; ``needed``: the protocols that averaging needs."""

    def __init__(self, host: SoftwareHost, journal: Journal, needed: Sequence[str]) -> None:
        self.apart: dict[bytes, Standing] = {}
        """Peers that this node cannot average with."""
        self._host = host
        self._journal = journal
        self._needed = needed
        self._asks: dict[bytes, tuple[float, float]] = {}  # peer -> when to ask it again, and the pause after that
        self._warned: set[Standing] = set()

    async def run(self) -> None:
        """Look at the connected peers until cancelled."""
        while True:
            async with trio.open_nursery() as nursery:
                for peer in self._unclear():
                    nursery.start_soon(self._host.identify, peer)
            self.look()
            await trio.sleep(LOOK_INTERVAL)

    def _unclear(self) -> list[bytes]:
        """Return the peers to ask now."""
        now, connected = trio.current_time(), self._host.connected
        self._asks = {peer: ask for peer, ask in self._asks.items() if peer in connected}
        due = []
        for peer in connected:
            if is_incomplete(self._host.software_of(peer), self._needed):
                ask_at, pause = self._asks.setdefault(peer, (now + FIRST_ASK_PAUSE, FIRST_ASK_PAUSE))
                if now >= ask_at:
                    longer = min(2 * pause, MAX_ASK_PAUSE)
                    self._asks[peer] = now + longer, longer
                    due.append(peer)
        return due

    def look(self) -> ReleaseConflict:
        """Judge what the connected peers have said; warn once of older ones and once of newer ones."""
        known = {peer: self._host.software_of(peer) for peer in sorted(self._host.connected)}
        own = self._host.protocols
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
        if fresh := set(self.apart.values()) - self._warned:
            self._warned |= fresh
            self._journal.warn(": ".join(release_words(conflict, VERSION)))
            names = ", ".join(short_name(peer) for peer in list(self.apart)[:MAX_NAMED])
            self._journal.say(f"their names here: {names}")
        return conflict
