"""Finding back into a run: a node without a connection to any member redials every known peer until one answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

import trio

from ..base.backoff import pauses
from ..mesh.host import Host
from ..status.journal import Journal
from .address_book import AddressBook
from .bootstrap import Target, dial, find_members

# Seconds between two looks at whether there is a connection, and between two rounds of dialling, which become rarer.
ISOLATION_INTERVAL: Final = 5.0
MAX_ISOLATION_INTERVAL: Final = 60.0


class Reconnector:
    """Redials the peers of the invite, of the address book and of the DHT. ``members`` returns the live members."""

    def __init__(
        self,
        host: Host,
        run_id: bytes,
        book: AddressBook,
        target: Target,
        members: Callable[[], frozenset[bytes]],
        journal: Journal,
    ) -> None:
        self._host = host
        self._run_id = run_id
        self._book = book
        self._target = target
        self._members = members
        self._journal = journal
        self._rng = random.Random()

    async def run(self) -> None:
        """Reconnect whenever there is no connection to any member, until cancelled."""
        while True:
            await trio.sleep(ISOLATION_INTERVAL * self._rng.uniform(0.5, 1.5))
            if self._is_isolated:
                await self._reconnect()
            self._journal.update(isolation="")

    async def _reconnect(self) -> None:
        for attempt, pause in enumerate(pauses(ISOLATION_INTERVAL, MAX_ISOLATION_INTERVAL, self._rng), 1):
            is_any_known = await self._seek_members()
            if not self._is_isolated:
                return
            if is_any_known:
                times = "once" if attempt == 1 else f"{attempt} times"
                words = f"dialled all known peers {times}, no member answered; next in {pause:.0f} s"
                self._journal.update(isolation=words)
            next_at = trio.current_time() + pause
            while trio.current_time() < next_at:
                await trio.sleep(min(ISOLATION_INTERVAL, pause))
                if not self._is_isolated:  # others have dialled us
                    return

    @property
    def _is_isolated(self) -> bool:
        return not self._host.connected & self._members()

    async def _seek_members(self) -> bool:
        """Dial every known peer; returns whether there was any."""
        known = {**self._book.peers(), **self._target.peers}
        missing = {
            peer: addresses
            for peer, addresses in known.items()
            if peer != self._host.author and peer not in self._host.connected
        }
        await dial(self._host, missing, is_one_enough=True)
        found = await find_members(self._host, self._run_id) if self._is_isolated and self._host.connected else []
        return bool(missing or found)
