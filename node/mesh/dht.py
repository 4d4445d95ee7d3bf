"""Who provides what, in a Kademlia DHT of farandole's own: announcing keys, finding the providers of one, answering.

Decisions and records are in `farandole.protocol.kademlia`. Many peers are asked at once, so a frozen one holds up no
other. Answers are hints: a provider proves itself when it is dialled.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

import trio

from farandole.protocol.errors import RemoteProtocolError
from farandole.protocol.identity import peer_id_bytes
from farandole.protocol.kademlia import (
    BUCKET_SIZE,
    KAD_PROTOCOL,
    REANNOUNCE_INTERVAL,
    Lookup,
    PeerAddresses,
    ProviderRecords,
    RoutingTable,
    position_of,
    position_of_peer,
)
from farandole.protocol.token_bucket import PeerMeters

from ..base.errors import PeerUnreachableError
from ..base.streams import Stream, StreamHost
from .dht_messages import MAX_ANSWER_BYTES, MAX_QUESTION_BYTES, DhtKind, DhtMessage, encode_dht, receive_dht
from .known_addresses import MAX_ADDRESSES

logger = logging.getLogger(__name__)

KEY_BYTES: Final = 32
# A key's multihash says that it is a SHA-256: function 0x12, 32 bytes.
_MULTIHASH_PREFIX: Final = b"\x12\x20"
# One inbound stream, and how many of them a peer may have; it asks one question on each.
STREAM_TIMEOUT: Final = 10.0
MAX_STREAMS_PER_PEER: Final = 3
# One question: a dial, a round trip. A frozen peer takes all of it.
QUERY_TIMEOUT: Final = 8.0
# Announcements that are taken from one peer: so many at once, then so many a second. In a small network all go to the
# same peers, so a node spaces its own.
ANNOUNCEMENT_BURST, ANNOUNCEMENTS_PER_SECOND = 10.0, 1.0
ANNOUNCEMENT_INTERVAL = 1.1
ANNOUNCEMENT_TIMEOUT: Final = 20.0
# How long to wait before an announcement that reached nobody is tried again; a new connection shortens it.
RETRY_INTERVAL: Final = 60.0
REFRESH_INTERVAL: Final = 600.0
# Once somebody is found, those who have not answered get this much longer.
LAGGARDS_TIMEOUT = 1.0
MAX_PROVIDERS: Final = 20


class DhtHost(StreamHost, Protocol):
    """A host that knows who is connected, and where peers may be reached."""

    @property
    def author(self) -> bytes:
        """This node's public key."""

    @property
    def addresses(self) -> list[str]:
        """Where this node can be dialled, as multiaddrs."""

    @property
    def connected(self) -> frozenset[bytes]:
        """The peers with a live connection."""

    def addresses_of(self, peer: bytes) -> list[str]:
        """The addresses known for a peer, the best first."""

    def add_hearsay(self, peer: bytes, addresses: Iterable[str]) -> None:
        """Remember where a peer may be reached, as others say."""


def multihash_of(key: bytes) -> bytes:
    """The key as the DHT wants it."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, this has {len(key)}")
    return _MULTIHASH_PREFIX + key


class Dht:
    """This node's part in the DHT, as a server; `run` keeps it going."""

    def __init__(self, host: DhtHost) -> None:
        self._host = host
        self._table = RoutingTable(host.author)
        self._records = ProviderRecords()
        self._num_served: Counter[bytes] = Counter()
        self._announcements = PeerMeters(ANNOUNCEMENT_BURST, ANNOUNCEMENTS_PER_SECOND)
        self._announced_at: dict[bytes, float] = {}  # when each key that we provide was last told to somebody
        self._pace = trio.Lock()
        self._announce_after = -math.inf
        self._refreshed_at = -math.inf
        self._news = trio.Event()
        host.set_handler(KAD_PROTOCOL, self._serve)

    def note_connection(self) -> None:
        """A peer came: look around from it, and tell it what nobody was there to hear."""
        self._news.set()

    async def run(self) -> None:
        """Keep the routing table fresh and our keys announced. Raises nothing, never returns."""
        while True:
            self._news = trio.Event()
            await self._refresh_if_due()
            self._records.forget_expired(trio.current_time())
            await self._announce_due()
            with trio.move_on_after(self._pause()):
                await self._news.wait()
            # Several peers often come together.
            await trio.sleep(1.0)

    async def _refresh_if_due(self) -> None:
        # Every newcomer matters to a small table, and none to one that is full around us.
        is_small = len(self._table) < BUCKET_SIZE
        if is_small or trio.current_time() - self._refreshed_at >= REFRESH_INTERVAL:
            self._refreshed_at = trio.current_time()
            with trio.move_on_after(REFRESH_INTERVAL / 2):
                own = self._host.author
                await self._look_up(position_of_peer(own), DhtMessage(DhtKind.FIND_NODE, peer_id_bytes(own)))

    def _pause(self) -> float:
        is_unheard = any(at < 0 for at in self._announced_at.values())
        return RETRY_INTERVAL if is_unheard else REFRESH_INTERVAL

    # Announcing

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

    async def _announce(self, key: bytes) -> None:
        async with self._pace:
            await trio.sleep_until(self._announce_after)
            if key not in self._announced_at:
                return  # withdrawn meanwhile
            self._announce_after = trio.current_time() + ANNOUNCEMENT_INTERVAL
            with trio.move_on_after(ANNOUNCEMENT_TIMEOUT):
                await self._tell_closest(key)

    async def _tell_closest(self, key: bytes) -> None:
        multihash = multihash_of(key)
        closest = await self._look_up(position_of(multihash), DhtMessage(DhtKind.FIND_NODE, multihash))
        me = PeerAddresses(self._host.author, tuple(self._host.addresses[:MAX_ADDRESSES]))

        async def tell(peer: bytes) -> None:
            answer = await self._query(peer, DhtMessage(DhtKind.ADD_PROVIDER, multihash, providers=(me,)))
            if answer is not None and key in self._announced_at:
                self._announced_at[key] = trio.current_time()

        async with trio.open_nursery() as nursery:
            for peer in closest:
                nursery.start_soon(tell, peer)

    # Finding

    async def find_providers(self, key: bytes, seconds: float) -> list[tuple[bytes, list[str]]]:
        """Peers that say they provide a key, with their addresses, asked in parallel within this many seconds."""
        multihash = multihash_of(key)
        answers: list[Sequence[PeerAddresses]] = []
        scope = trio.CancelScope(deadline=trio.current_time() + seconds)

        def add(providers: Sequence[PeerAddresses]) -> None:
            if others := [provider for provider in providers if provider.peer != self._host.author]:
                answers.append(others)
                scope.deadline = min(scope.deadline, trio.current_time() + LAGGARDS_TIMEOUT)

        with scope:
            add(self._records.of(multihash, trio.current_time()))
            question = DhtMessage(DhtKind.GET_PROVIDERS, multihash)
            await self._look_up(position_of(multihash), question, lambda answer: add(answer.providers))
        return by_turns(answers)

    async def _look_up(
        self, target: int, question: DhtMessage, note: Callable[[DhtMessage], None] = lambda answer: None
    ) -> list[bytes]:
        """Ask the question of ever closer peers; returns the closest that have answered."""
        known = (*self._table.closest(target), *self._host.connected)
        lookup = Lookup(target, known, self._host.author)
        news = trio.Event()

        async def ask(peer: bytes) -> None:
            answer = await self._query(peer, question)
            if answer is None:
                lookup.note_failure(peer)
            else:
                for each in answer.closer:
                    self._host.add_hearsay(each.peer, each.addresses)
                lookup.note_answer(peer, [each.peer for each in answer.closer])
                note(answer)
            news.set()

        async with trio.open_nursery() as nursery:
            while not lookup.is_over:
                news = trio.Event()
                for peer in lookup.ask():
                    nursery.start_soon(ask, peer)
                await news.wait()
        return lookup.closest

    async def _query(self, peer: bytes, question: DhtMessage) -> DhtMessage | None:
        """A peer's answer; None if it gives none."""
        try:
            with trio.fail_after(QUERY_TIMEOUT):
                stream = await self._host.open_stream(peer, KAD_PROTOCOL, QUERY_TIMEOUT)
                try:
                    await stream.send_all(encode_dht(question))
                    answer = await receive_dht(stream, MAX_ANSWER_BYTES)
                finally:
                    await stream.aclose()
        except (PeerUnreachableError, RemoteProtocolError, trio.BrokenResourceError, trio.TooSlowError) as error:
            logger.debug("no answer in the DHT: %r", error)
            answer = None
        if answer is None or answer.kind != question.kind:
            self._table.remove(peer)
            return None
        self._table.add(peer)
        return answer

    # Answering

    async def _serve(self, stream: Stream) -> None:
        peer = stream.peer
        if self._num_served[peer] >= MAX_STREAMS_PER_PEER:
            raise RemoteProtocolError("too many questions at once")
        self._num_served[peer] += 1
        try:
            with trio.fail_after(STREAM_TIMEOUT):
                while (question := await receive_dht(stream, MAX_QUESTION_BYTES)) is not None:
                    self._table.add(peer)
                    await stream.send_all(encode_dht(self._answer(peer, question)))
        finally:
            self._num_served[peer] -= 1
            if not self._num_served[peer]:
                del self._num_served[peer]

    def _answer(self, peer: bytes, question: DhtMessage) -> DhtMessage:
        now = trio.current_time()
        if question.kind is DhtKind.ADD_PROVIDER:
            if not self._announcements.of(peer, now).take(now):
                raise RemoteProtocolError("too many announcements")
            for provider in question.providers:
                if provider.peer == peer:  # nobody speaks for another
                    self._records.add(question.key, provider, now)
            return DhtMessage(question.kind, question.key)
        providers: tuple[PeerAddresses, ...] = ()
        closer: tuple[PeerAddresses, ...] = ()
        if question.kind is DhtKind.GET_PROVIDERS:
            own = question.key.removeprefix(_MULTIHASH_PREFIX) in self._announced_at
            providers = tuple(self._records.of(question.key, now)[: BUCKET_SIZE - own])
            providers += (self._named(self._host.author, self._host.addresses),) * own
        if question.kind is not DhtKind.PING:
            closest = self._table.closest(position_of(question.key), BUCKET_SIZE + 1)
            named = (self._named(each, self._host.addresses_of(each)) for each in closest if each != peer)
            closer = tuple(each for each in named if each.addresses)[:BUCKET_SIZE]
        return DhtMessage(question.kind, question.key, closer, providers)

    def _named(self, peer: bytes, addresses: Sequence[str]) -> PeerAddresses:
        return PeerAddresses(peer, tuple(addresses[:MAX_ADDRESSES]))


def by_turns(answers: Sequence[Sequence[PeerAddresses]]) -> list[tuple[bytes, list[str]]]:
    """The first `MAX_PROVIDERS`, one of each answer after the other: no answer keeps the others' out."""
    found: dict[bytes, list[str]] = {}
    for provider in itertools.chain.from_iterable(itertools.zip_longest(*answers)):
        if provider is not None:
            addresses = found.setdefault(provider.peer, [])
            addresses += [address for address in provider.addresses if address not in addresses]
            del addresses[MAX_ADDRESSES:]
    return list(found.items())[:MAX_PROVIDERS]
