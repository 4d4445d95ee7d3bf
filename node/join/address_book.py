"""The address book: members that this node has reached, and their addresses, in case no other known peer answers.

It is in the node's store, which is of one run. It contains what peers announced, so what is read back is checked like
anything from outside, and only ever dialled. A peer that this node has not reached for two months is forgotten.

An attacker can come by under a thousand keys, and so be all that was reached last (an eclipse: Heilman et al., "Eclipse
Attacks on Bitcoin's Peer-to-Peer Network", USENIX Security 2015, section 4). An exchange costs a round of training. So
half of the book, and half of the dialled peers, are reserved for peers with which exchanges were committed.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec
import trio

from farandole.protocol.wire.bounds import pauses
from farandole.protocol.wire.identity import PUBLIC_KEY_BYTES

from ..mesh.addresses import MAX_ADDRESS_CHARS, MAX_ADDRESSES
from ..mesh.host import Host
from ..state.store import Store, StoreError
from ..status.journal import Journal
from .bootstrap import NO_ANSWER, Target, dial, find_members

logger = logging.getLogger(__name__)

# A few hundred kilobytes on disk. The peers reached longest ago make room, except partners in up to half of the book.
MAX_PEERS: Final = 1_024
MAX_KEPT_PARTNERS: Final = MAX_PEERS // 2
# Dialled at a start: partners, with which exchanges were committed, in random order; the latest; and some of the
# others. So a crowd of newcomers, which may be one attacker, does not come between a node and the peers that it knew
# before. If none of all these answers, this machine is offline. All of them can be dialled in 48 s, 16 at a time.
NUM_PARTNERS: Final = 48
NUM_LATEST: Final = 24
NUM_OTHERS: Final = 24
# Home addresses change within weeks, but a machine with a fixed one may well be switched off for a summer.
MAX_AGE: Final = 60 * 86_400.0
# New peers and addresses are written at once, times alone once in each interval.
SAVE_INTERVAL: Final = 600.0

_Address = Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS_CHARS, pattern=r"^/[!-~]*$")]
_Addresses = Annotated[tuple[_Address, ...], msgspec.Meta(min_length=1, max_length=MAX_ADDRESSES)]

_Peer = Annotated[bytes, msgspec.Meta(min_length=PUBLIC_KEY_BYTES, max_length=PUBLIC_KEY_BYTES)]
_Row = tuple[_Peer, bytes, float]


@dataclass(frozen=True, slots=True)
class _Entry:
    addresses: tuple[str, ...]
    reached_at: float


@dataclass(eq=False)
class AddressBook:
    """The address book of one node. `load` it first; call `save` at times."""

    _store: Store
    _is_partner: Callable[[bytes], bool] = lambda peer: False
    """Whether exchanges with a peer were committed."""
    clock: Callable[[], float] = time.time
    """Gives Unix time."""
    rng: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self._entries: dict[bytes, _Entry] = {}
        self._unsaved: set[bytes] = set()

    async def load(self) -> None:
        """Load what is stored. Damaged rows are left out, and a broken disk leaves the book empty, with a warning."""
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
                self._entries[peer] = _Entry(addresses, min(reached_at, self.clock()))
        if num_damaged:
            logger.warning("%d entries of the address book are damaged, and left out", num_damaged)
        self._forget()

    def note_reached(self, peer: bytes, addresses: Iterable[str]) -> None:
        """Note that there is a connection to a peer (its public key) now, and its addresses, the best first.

        Without any address nothing is noted, because the peer could not be dialled.
        """
        usable = [address for address in addresses if len(address) <= MAX_ADDRESS_CHARS][:MAX_ADDRESSES]
        if not usable:
            return
        before, now = self._entries.get(peer), self.clock()
        is_same = before is not None and set(before.addresses) == set(usable)
        if before is None or not is_same or before.reached_at // SAVE_INTERVAL != now // SAVE_INTERVAL:
            self._unsaved.add(peer)
        self._entries[peer] = _Entry(tuple(usable), now)

    def peers(self) -> dict[bytes, list[str]]:
        """Return the peers to dial with their addresses: the latest first, then some partners, then some others."""
        latest = self._latest_first()
        chosen = latest[:NUM_LATEST]
        for are_partners, number in ((True, NUM_PARTNERS), (False, NUM_OTHERS)):
            others = [peer for peer in latest[NUM_LATEST:] if self._is_partner(peer) is are_partners]
            chosen += self.rng.sample(others, min(number, len(others)))
        return {peer: list(self._entries[peer].addresses) for peer in chosen}

    async def save(self) -> None:
        """Write the changes, if there are any. Raises `StoreError`."""
        self._forget()
        if not self._unsaved:
            return
        unsaved, self._unsaved = self._unsaved, set()
        kept = [
            (peer, msgspec.json.encode(entry.addresses), entry.reached_at)
            for peer in unsaved
            if (entry := self._entries.get(peer)) is not None
        ]
        try:
            await self._store.save_peers(kept, unsaved - self._entries.keys())
        except BaseException:  # also a cancellation: what is not written is written the next time
            self._unsaved |= unsaved
            raise

    def _latest_first(self) -> list[bytes]:
        return sorted(self._entries, key=lambda peer: -self._entries[peer].reached_at)

    def _forget(self) -> None:
        oldest = self.clock() - MAX_AGE
        latest = self._latest_first()
        kept = [peer for peer in latest if self._is_partner(peer)][:MAX_KEPT_PARTNERS]
        first = dict.fromkeys([*kept, *latest])
        for index, peer in enumerate(first):
            if index >= MAX_PEERS or self._entries[peer].reached_at < oldest:
                del self._entries[peer]
                self._unsaved.add(peer)


# Redialling

# For a member that is cut off: seconds between two looks, and between two rounds of dialling, which become rarer.
ISOLATION_INTERVAL, MAX_ISOLATION_INTERVAL = 5.0, 60.0


async def keep_reconnecting(
    host: Host, book: AddressBook, target: Target, members: Callable[[], frozenset[bytes]], journal: Journal
) -> None:
    """Redial peers of the invite, the address book and the DHT while no member is connected, until cancelled.

    ``members`` returns the live members. At first all known peers are dialled, once: the peers that answered first, at
    the start, may all belong to one attacker, and know of each other only.
    """
    rng = random.Random()

    def is_isolated() -> bool:
        return not host.connected & members()

    def missing() -> dict[bytes, list[str]]:
        known = {**book.peers(), **target.peers}
        there = {host.author, *host.connected}
        return {peer: addresses for peer, addresses in known.items() if peer not in there}

    await dial(host, missing())
    while True:
        await trio.sleep(ISOLATION_INTERVAL * rng.uniform(0.5, 1.5))
        for attempt, pause in enumerate(pauses(ISOLATION_INTERVAL, MAX_ISOLATION_INTERVAL, rng), 1):
            if not is_isolated():
                break
            dialled, found = missing(), list[bytes]()
            await dial(host, dialled, is_one_enough=True)
            if is_isolated() and host.connected:
                found = await find_members(host, target.run_id)
            if is_isolated() and (dialled or found):
                times = "once" if attempt == 1 else f"{attempt} times"
                journal.update(isolation=f"dialled all known peers {times}, no member answered; next in {pause:.0f} s")
            next_at = trio.current_time() + pause
            while trio.current_time() < next_at:
                await trio.sleep(min(ISOLATION_INTERVAL, pause))
                if not is_isolated():  # other peers have dialled this node
                    break
        journal.update(isolation="")
        journal.over(NO_ANSWER)


# The listening ports that a node got at its first start, tried first at each later start.
#
# An invite, a router's port forwarding and the address books of other members all name a port. They remain valid
# after a restart only if the node listens on the same port again. Only ``--port 0``, the default, leaves the choice
# open.

_FACT: Final = "first port of "
_ANY_PORT: Final = "/tcp/0"
_MAX_PORT: Final = 65_535
_MAX_DIGITS: Final = 5


async def load_ports(store: Store, listen: Iterable[str]) -> dict[str, int]:
    """Return the kept port of each multiaddr that has port 0 and was listened on before."""
    ports: dict[str, int] = {}
    for address in listen:
        raw = (await store.get_fact(_FACT + address) or b"") if address.endswith(_ANY_PORT) else b""
        if raw.isdigit() and len(raw) <= _MAX_DIGITS and 0 < int(raw) <= _MAX_PORT:
            ports[address] = int(raw)
    return ports


async def keep_ports(store: Store, kept: Mapping[str, int], bound: Mapping[str, int], journal: Journal) -> None:
    """Store the ports of multiaddrs with port 0 that have none yet; warn about each kept port that was taken.

    ``kept``: from `load_ports`; ``bound``: multiaddr -> the port that the node listens on now. A port that was taken
    stays the kept one: older invites name it, and the program that has it now may be gone at the next start.
    """
    for address, port in bound.items():
        if not address.endswith(_ANY_PORT):
            continue
        if address not in kept:
            loss = f"the next start may use another port than {port}"
            await store.remember(_FACT + address, str(port).encode("ascii"), journal, loss)
        elif kept[address] != port:  # for both versions of IP: a repetition is not printed
            journal.warn(
                f"port {kept[address]}, on which this node listened before, is taken: it listens on {port} now. "
                "Invites made before may not find this node: make new ones, or stop the program that has the port. "
                "`--port PORT` sets a port for good"
            )
