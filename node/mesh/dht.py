"""Who provides what, in the Kademlia DHT of libp2p: announcing keys, and finding the providers of one.

The library's `KadDHT` keeps the tables and answers others; the asking is done here, because there a frozen peer costs
each question its full 10 s, a node that provides a key finds only itself, and announcements beyond 10 in 10 s are
dropped in silence by whoever receives them. Answers are hints: a provider proves itself when it is dialled.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import trio
from libp2p.kad_dht.common import BUCKET_SIZE
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo

from farandole.protocol.errors import RemoteProtocolError
from farandole.protocol.identity import public_key_of

from .workarounds.dht import REANNOUNCE_INTERVAL, BoundedDht
from .workarounds.host import MendedHost
from .workarounds.peers import MAX_ADDRESSES

logger = logging.getLogger(__name__)

KEY_BYTES = 32
# A key's multihash says that it is a SHA-256: function 0x12, 32 bytes.
_MULTIHASH_PREFIX = b"\x12\x20"
# Receivers drop what exceeds 10 announcements in 10 s from one peer, and in a small network all go to the same peers.
ANNOUNCEMENT_INTERVAL = 1.1
ANNOUNCEMENT_TIMEOUT = 20.0
# How long to wait before an announcement that reached nobody is tried again; a new connection shortens it.
RETRY_INTERVAL = 60.0
REFRESH_INTERVAL = 600.0
# Once somebody is found, those who have not answered get this much longer.
LAGGARDS_TIMEOUT = 1.0
MAX_PROVIDERS = 20


def multihash_of(key: bytes) -> bytes:
    """The key as the DHT wants it."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, this has {len(key)}")
    return _MULTIHASH_PREFIX + key


class Dht:
    """This node's part in the DHT, as a server; `run` keeps it going."""

    def __init__(self, host: MendedHost) -> None:
        self._host = host
        self._dht = BoundedDht(host)
        self._announced_at: dict[bytes, float] = {}  # when each key that we provide was last told to somebody
        self._pace = trio.Lock()
        self._announce_after = -math.inf
        self._refreshed_at = -math.inf
        self._news = trio.Event()

    def note_connection(self) -> None:
        """A peer came: look around from it, and tell it what nobody was there to hear."""
        self._news.set()

    async def run(self) -> None:
        """Keep the routing table fresh and our keys announced. Raises nothing, never returns."""
        while True:
            self._news = trio.Event()
            try:
                await self._refresh_if_due()
                self._dht.forget()
                await self._announce_due()
            except Exception:  # whatever the library makes of hostile answers, the next turn may go well
                logger.warning("the DHT's upkeep failed", exc_info=True)
            with trio.move_on_after(self._pause()):
                await self._news.wait()
            # Several peers often come together.
            await trio.sleep(1.0)

    async def _refresh_if_due(self) -> None:
        # Every newcomer matters to a small table, and none to one that is full around us.
        is_small = self._dht.get_routing_table_size() < BUCKET_SIZE
        if is_small or trio.current_time() - self._refreshed_at >= REFRESH_INTERVAL:
            self._refreshed_at = trio.current_time()
            with trio.move_on_after(REFRESH_INTERVAL / 2):
                await self._dht.refresh_routing_table()

    def _pause(self) -> float:
        is_unheard = any(at < 0 for at in self._announced_at.values())
        return RETRY_INTERVAL if is_unheard else REFRESH_INTERVAL

    async def _announce_due(self) -> None:
        for key, at in list(self._announced_at.items()):
            if at < 0 or trio.current_time() - at >= REANNOUNCE_INTERVAL:
                await self._announce(key)

    async def provide(self, key: bytes) -> None:
        """Announce that this node provides a key, and keep it announced.

        Returns after the first announcement, whether or not it reached anybody. Announcements are paced, so many keys
        at once take a second each.
        """
        multihash_of(key)
        self._announced_at.setdefault(key, -1.0)
        if self._announced_at[key] < 0:
            await self._announce(key)

    def withdraw(self, key: bytes) -> None:
        """Announce a key no more, and say so to those who ask this node; what others keep of it expires."""
        self._announced_at.pop(key, None)
        self._dht.provider_store.providing_keys.discard(multihash_of(key))
        self._dht.provider_store.providers.get(multihash_of(key), {}).pop(str(self._host.get_id()), None)

    async def _announce(self, key: bytes) -> None:
        async with self._pace:
            await trio.sleep_until(self._announce_after)
            if key not in self._announced_at:
                return  # withdrawn meanwhile
            self._announce_after = trio.current_time() + ANNOUNCEMENT_INTERVAL
            try:
                with trio.move_on_after(ANNOUNCEMENT_TIMEOUT):
                    if await self._dht.provider_store.provide(multihash_of(key)) and key in self._announced_at:
                        self._announced_at[key] = trio.current_time()
            except Exception:  # as above; the key is due again
                logger.warning("an announcement in the DHT failed", exc_info=True)

    async def find_providers(self, key: bytes, seconds: float) -> list[tuple[bytes, list[str]]]:
        """Peers that say they provide a key, with their addresses, asked in parallel within so many seconds."""
        multihash = multihash_of(key)
        answers: list[list[PeerInfo]] = []
        asked: set[ID] = {self._host.get_id()}
        store = self._dht.provider_store

        def add(providers: Sequence[PeerInfo]) -> None:
            if others := [provider for provider in providers if provider.peer_id != self._host.get_id()]:
                answers.append(others)
                nursery.cancel_scope.deadline = min(
                    nursery.cancel_scope.deadline, trio.current_time() + LAGGARDS_TIMEOUT
                )

        async def ask(peer_id: ID) -> None:
            providers, _ = await store._get_providers_from_peer_with_closers(peer_id, multihash)
            add(providers)

        def ask_all(peer_ids: Sequence[ID]) -> None:
            for peer_id in peer_ids:
                if peer_id not in asked:
                    asked.add(peer_id)
                    nursery.start_soon(ask, peer_id)

        async def explore() -> None:
            try:
                ask_all(await self._dht.peer_routing.find_closest_peers_network(multihash))
            except Exception:  # as above; whom this node knows is asked all the same
                logger.warning("a lookup in the DHT failed", exc_info=True)

        async with trio.open_nursery() as nursery:
            nursery.cancel_scope.deadline = trio.current_time() + seconds
            known = self._dht.routing_table.find_local_closest_peers(multihash, MAX_PROVIDERS)
            ask_all([*known, *self._host.get_connected_peers()][: 2 * MAX_PROVIDERS])
            nursery.start_soon(explore)
            add(store.get_providers(multihash))
        return _by_turns(answers)


def _by_turns(answers: Sequence[Sequence[PeerInfo]]) -> list[tuple[bytes, list[str]]]:
    """The first `MAX_PROVIDERS`, one of each answer after the other: no answer keeps the others' out."""
    found: dict[bytes, list[str]] = {}
    for provider in itertools.chain.from_iterable(itertools.zip_longest(*answers)):
        if provider is not None:
            with suppress(RemoteProtocolError):
                addresses = found.setdefault(_peer_of(provider.peer_id), [])
                addresses += [address for address in _texts(provider.addrs) if address not in addresses]
                del addresses[MAX_ADDRESSES:]
    return list(found.items())[:MAX_PROVIDERS]


def _texts(addresses: Iterable[object]) -> Iterator[str]:
    """Multiaddrs as text. They hold whatever bytes a peer sent, which the library looks at only here."""
    for address in addresses:
        with suppress(Exception):
            yield str(address)


def _peer_of(peer_id: ID) -> bytes:
    return public_key_of(peer_id.to_base58())
