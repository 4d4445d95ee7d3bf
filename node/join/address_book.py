"""The address book: members that this node has reached, and where, for when nobody whom it was told of answers.

It lives in the node's store, which is of one run. What a peer announced is in it, so what is read back is checked like
anything from outside, and only ever dialled. A peer that this node has not reached for two months is forgotten.

Anybody can come by under a thousand keys, and so be all that was reached last (an eclipse: Heilman et al., "Eclipse
Attacks on Bitcoin's Peer-to-Peer Network", USENIX Security 2015, section 4). An exchange costs a round of training. So
peers with which exchanges were committed have half of the book, and half of those that are dialled, to themselves.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from farandole.protocol.identity import PUBLIC_KEY_BYTES

from ..state.store import Store, StoreError

logger = logging.getLogger(__name__)

# A few hundred kilobytes on disk. The peers reached longest ago make room, but up to half of all for partners.
MAX_PEERS: Final = 1_024
MAX_KEPT_PARTNERS: Final = MAX_PEERS // 2
# Of one peer: a few interfaces in two families, and a relay or two.
MAX_ADDRESSES: Final = 16
MAX_ADDRESS_CHARS: Final = 512
# Given to dial at a start: peers with whom exchanges were committed, in any order, the latest, and some of the others.
# So a crowd of newcomers, which may be one stranger, does not stand between a node and those that it knew before. If
# none of all these answers, this machine is offline. All of them together can be dialled in 48 s, 16 at a time.
NUM_PARTNERS: Final = 48
NUM_LATEST: Final = 24
NUM_OTHERS: Final = 24
# Home addresses change within weeks, but a machine with a fixed one may well be switched off for a summer.
MAX_AGE: Final = 60 * 86_400.0
# Whoever is new is written at once, times alone as often as this.
SAVE_INTERVAL: Final = 600.0

_Address = Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS_CHARS, pattern=r"^/[!-~]*$")]
_Addresses = Annotated[tuple[_Address, ...], msgspec.Meta(min_length=1, max_length=MAX_ADDRESSES)]

_Peer = Annotated[bytes, msgspec.Meta(min_length=PUBLIC_KEY_BYTES, max_length=PUBLIC_KEY_BYTES)]
_Row = tuple[_Peer, bytes, float]


@dataclass(frozen=True, slots=True)
class _Entry:
    addresses: tuple[str, ...]
    reached_at: float


class AddressBook:
    """See the head of the file. `load` it first; `save` it now and then, which writes no more than it must."""

    def __init__(
        self,
        store: Store,
        is_partner: Callable[[bytes], bool] = lambda peer: False,
        *,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        """``is_partner``: whether exchanges with a peer were committed. ``clock`` gives Unix time."""
        self._store = store
        self._is_partner = is_partner
        self._clock = clock
        self._rng = rng or random.Random()
        self._entries: dict[bytes, _Entry] = {}
        self._unsaved: set[bytes] = set()
        self._is_urgent = False
        self._saved_at = clock()

    async def load(self) -> None:
        """Take in what is stored. What is damaged is left out, and a broken disk leaves the book empty: a warning."""
        try:
            rows = await self._store.load_peers()
        except StoreError as error:
            logger.warning("starting without the address book: %s", error)
            return
        num_damaged = 0
        for row in rows:
            try:
                peer, raw, reached_at = msgspec.convert(row, _Row)
                addresses = msgspec.json.decode(raw, type=_Addresses)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                num_damaged += 1
                self._unsaved.add(row[0])
            else:
                # A clock that was ahead once must not keep a peer in front for ever.
                self._entries[peer] = _Entry(addresses, min(reached_at, self._clock()))
        if num_damaged:
            logger.warning("%d entries of the address book are damaged, and left out", num_damaged)
        self._forget()

    def note_reached(self, peer: bytes, addresses: Iterable[str]) -> None:
        """That there is a connection to a peer (its public key) now, and where it can be dialled, the best first.

        Without any address nothing is noted: it could not be dialled.
        """
        usable = [address for address in addresses if len(address) <= MAX_ADDRESS_CHARS][:MAX_ADDRESSES]
        if not usable:
            return
        before = self._entries.get(peer)
        self._is_urgent |= before is None or set(before.addresses) != set(usable)
        self._entries[peer] = _Entry(tuple(usable), self._clock())
        self._unsaved.add(peer)

    def peers(self) -> dict[bytes, list[str]]:
        """Whom to dial -> at which addresses: the latest first, then some of the partners, then some of the others."""
        latest = self._latest_first()
        chosen = latest[:NUM_LATEST]
        for are_partners, number in ((True, NUM_PARTNERS), (False, NUM_OTHERS)):
            others = [peer for peer in latest[NUM_LATEST:] if self._is_partner(peer) is are_partners]
            chosen += self._rng.sample(others, min(number, len(others)))
        return {peer: list(self._entries[peer].addresses) for peer in chosen}

    async def save(self, *, is_last: bool = False) -> None:
        """Write what is new, if somebody is, or if it is time, or for the last time. Raises `StoreError`."""
        self._forget()
        is_due = self._is_urgent or is_last or self._clock() - self._saved_at >= SAVE_INTERVAL
        if not self._unsaved or not is_due:
            return
        unsaved, self._unsaved = self._unsaved, set()
        kept = [
            (peer, msgspec.json.encode(entry.addresses), entry.reached_at)
            for peer in unsaved
            if (entry := self._entries.get(peer)) is not None
        ]
        try:
            await self._store.save_peers(kept, unsaved - self._entries.keys())
        except BaseException:  # cancelled, too: what is not written is written the next time
            self._unsaved |= unsaved
            raise
        self._is_urgent = False
        self._saved_at = self._clock()

    def _latest_first(self) -> list[bytes]:
        return sorted(self._entries, key=lambda peer: -self._entries[peer].reached_at)

    def _forget(self) -> None:
        oldest = self._clock() - MAX_AGE
        latest = self._latest_first()
        kept = [peer for peer in latest if self._is_partner(peer)][:MAX_KEPT_PARTNERS]
        first = dict.fromkeys([*kept, *latest])
        for index, peer in enumerate(first):
            if index >= MAX_PEERS or self._entries[peer].reached_at < oldest:
                del self._entries[peer]
                self._unsaved.add(peer)
