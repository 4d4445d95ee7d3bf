"""A Kademlia DHT of farandole's own: announces keys, finds the providers of a key, answers other nodes.

Decisions and records are in `farandole.protocol.mesh.kademlia`. Many peers are asked at once, so a frozen one does not
delay the others. Answers are hints: a provider authenticates itself when it is dialled.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final

import trio

from farandole.protocol.mesh.kademlia import (
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
from farandole.protocol.wire.bounds import PeerMeters
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.identity import peer_id_bytes, public_key_of_bytes

from ..base.errors import PeerUnreachableError
from ..base.streams import DIAL_TIMEOUT, counted
from .addresses import MAX_ADDRESSES
from .connections import ProtocolHandlers
from .dialler import Dialler
from .libp2p_parts import DhtMessage as Message
from .libp2p_parts import encode_delimited, multiaddr_bytes, multiaddr_texts, next_message, receive_message
from .yamux import Libp2pStream

logger = logging.getLogger(__name__)

# A question is a key, with at most one provider's addresses: a few kilobytes.
MAX_QUESTION_BYTES: Final = 32 * 1024
# An answer has twenty peers and twenty providers, with at most `MAX_ADDRESSES` addresses each.
MAX_ANSWER_BYTES: Final = 512 * 1024
MAX_KEY_BYTES: Final = 128
# Messages that are answered here; this DHT stores no values.
KINDS: Final = (Message.ADD_PROVIDER, Message.GET_PROVIDERS, Message.FIND_NODE, Message.PING)
# A key's multihash says that it is a SHA-256: function 0x12, 32 bytes.
_MULTIHASH_PREFIX: Final = b"\x12\x20"
# One inbound stream, and how many of them a peer may have; it asks one question on each.
STREAM_TIMEOUT: Final = 10.0
MAX_STREAMS_PER_PEER: Final = 3
# One question: a dial, a round trip. A frozen peer takes all of it.
QUERY_TIMEOUT: Final = DIAL_TIMEOUT
# Announcements accepted from one peer: a burst, then a number a second. In a small network all go to the same peers, so
# a node spaces its own.
ANNOUNCEMENT_BURST, ANNOUNCEMENTS_PER_SECOND = 10.0, 1.0
ANNOUNCEMENT_INTERVAL = 1.1
ANNOUNCEMENT_TIMEOUT: Final = 20.0
# Pause before an announcement that reached no peer is tried again; a new connection shortens it.
RETRY_INTERVAL: Final = 60.0
REFRESH_INTERVAL: Final = 600.0
# When a provider is found, the peers that have not answered get this much more time.
LAGGARDS_TIMEOUT = 1.0
MAX_PROVIDERS: Final = 20


def multihash_of(key: bytes) -> bytes:
    """Return a key of 32 bytes as a multihash, the DHT's form of a key."""
    return _MULTIHASH_PREFIX + key


class Dht:
    """The DHT server of this node; `run` keeps it up to date."""

    def __init__(self, dialler: Dialler, handlers: ProtocolHandlers) -> None:
        self._dialler = dialler
        self._table = RoutingTable(dialler.author)
        self._records = ProviderRecords()
        self._num_served: Counter[bytes] = Counter()
        self._announcements = PeerMeters(ANNOUNCEMENT_BURST, ANNOUNCEMENTS_PER_SECOND)
        self._announced_at: dict[bytes, float] = {}  # when each key that we provide last reached a peer
        self._pace = trio.Lock()
        self._announce_after = -math.inf
        self._refreshed_at = -math.inf
        self.news = trio.Event()
        """Set at a new connection: the table is refreshed, and the keys that have reached no peer yet are announced."""
        handlers.set(KAD_PROTOCOL, self._serve)

    async def run(self) -> None:
        """Keep the routing table fresh and our keys announced. Raises nothing, never returns."""
        while True:
            self.news = trio.Event()
            # Every newcomer matters to a small table, and none to one that is full around us.
            is_small = len(self._table) < BUCKET_SIZE
            if is_small or trio.current_time() - self._refreshed_at >= REFRESH_INTERVAL:
                self._refreshed_at, own = trio.current_time(), self._dialler.author
                question = Message(type=Message.FIND_NODE, key=peer_id_bytes(own))
                with trio.move_on_after(REFRESH_INTERVAL / 2):
                    await self._look_up(position_of_peer(own), question)
            self._records.forget_expired(trio.current_time())
            for key, at in list(self._announced_at.items()):
                if at < 0 or trio.current_time() - at >= REANNOUNCE_INTERVAL:
                    await self._announce(key)
            is_unheard = any(at < 0 for at in self._announced_at.values())
            with trio.move_on_after(RETRY_INTERVAL if is_unheard else REFRESH_INTERVAL):
                await self.news.wait()
            # Several peers often come together.
            await trio.sleep(1.0)

    # Announcing

    async def provide(self, key: bytes) -> None:
        """Announce that this node provides a 32-byte key, and keep it announced for as long as the host is open.

        Returns after the first announcement, whether or not it reached a peer. Announcements are paced: with many keys
        at once, each takes a second.
        """
        self._announced_at.setdefault(key, -1.0)
        if self._announced_at[key] < 0:
            await self._announce(key)

    def withdraw(self, key: bytes) -> None:
        """Stop announcing a key, and stop reporting it to peers that ask; records at other nodes expire."""
        self._announced_at.pop(key, None)

    async def _announce(self, key: bytes) -> None:
        async with self._pace:
            await trio.sleep_until(self._announce_after)
            if key not in self._announced_at:
                return  # withdrawn during the pause
            self._announce_after = trio.current_time() + ANNOUNCEMENT_INTERVAL
            multihash = multihash_of(key)
            with trio.move_on_after(ANNOUNCEMENT_TIMEOUT):
                closest = await self._look_up(position_of(multihash), Message(type=Message.FIND_NODE, key=multihash))
                me = _named(self._dialler.author, self._dialler.own.all)
                announcement = Message(type=Message.ADD_PROVIDER, key=multihash, providerPeers=[me])

                async def tell(peer: bytes) -> None:
                    if await self._query(peer, announcement) is not None and key in self._announced_at:
                        self._announced_at[key] = trio.current_time()

                async with trio.open_nursery() as nursery:
                    for peer in closest:
                        nursery.start_soon(tell, peer)

    # Finding

    async def find_providers(self, key: bytes, timeout: float) -> list[PeerAddresses]:
        """Return other peers that claim to provide a key, with addresses, asked in parallel within ``timeout`` seconds.

        The addresses are remembered, so the peers can be connected to. Claims of peers may be false or out of date.
        """
        multihash = multihash_of(key)
        answers: list[Sequence[PeerAddresses]] = []
        scope = trio.CancelScope(deadline=trio.current_time() + timeout)

        def add(providers: Sequence[PeerAddresses]) -> None:
            if others := [provider for provider in providers if provider[0] != self._dialler.author]:
                answers.append(others)
                scope.deadline = min(scope.deadline, trio.current_time() + LAGGARDS_TIMEOUT)

        with scope:
            add(self._records.of(multihash, trio.current_time()))
            question = Message(type=Message.GET_PROVIDERS, key=multihash)
            await self._look_up(position_of(multihash), question, lambda answer: add(_peers(answer.providerPeers)))
        found = by_turns(answers)
        for peer, addresses in found:
            self._dialler.add_addresses(peer, addresses, is_hearsay=True)
        return found

    async def _look_up(
        self, target: int, question: Message, note: Callable[[Message], None] = lambda answer: None
    ) -> list[bytes]:
        """Ask ever closer peers the question; return the closest ones that have answered."""
        known = (*self._table.closest(target), *self._dialler.connections.connected)
        lookup = Lookup(target, known, self._dialler.author)
        news = trio.Event()

        async def ask(peer: bytes) -> None:
            answer = await self._query(peer, question)
            if answer is None:
                lookup.note_failure(peer)
            else:
                closer = _peers(answer.closerPeers)
                for each, addresses in closer:
                    self._dialler.add_addresses(each, addresses, is_hearsay=True)
                lookup.note_answer(peer, [each for each, _ in closer])
                note(answer)
            news.set()

        async with trio.open_nursery() as nursery:
            while not lookup.is_over:
                news = trio.Event()
                for peer in lookup.ask():
                    nursery.start_soon(ask, peer)
                await news.wait()
        return lookup.closest

    async def _query(self, peer: bytes, question: Message) -> Message | None:
        """Return a peer's answer, or None if there is none."""
        try:
            with trio.fail_after(QUERY_TIMEOUT):
                async with await self._dialler.open_stream(peer, KAD_PROTOCOL, QUERY_TIMEOUT) as stream:
                    await stream.send_all(encode_delimited(question))
                    answer = await receive_message(stream, Message, MAX_ANSWER_BYTES)
            if answer.type != question.type:
                raise RemoteProtocolError("an answer to another question")
        except (PeerUnreachableError, RemoteProtocolError, trio.BrokenResourceError, trio.TooSlowError) as error:
            logger.debug("no answer in the DHT: %r", error)
            self._table.remove(peer)
            return None
        self._table.add(peer)
        return answer

    # Answering

    async def _serve(self, stream: Libp2pStream) -> None:
        peer = stream.peer
        if self._num_served[peer] >= MAX_STREAMS_PER_PEER:
            raise RemoteProtocolError("too many questions at once")
        with counted(self._num_served, peer), trio.fail_after(STREAM_TIMEOUT):
            while (question := await next_message(stream, Message, MAX_QUESTION_BYTES)) is not None:
                if question.type not in KINDS or len(question.key) > MAX_KEY_BYTES:
                    raise RemoteProtocolError("not a question that this DHT answers")
                self._table.add(peer)
                await stream.send_all(encode_delimited(self._answer(peer, question)))

    def _answer(self, peer: bytes, question: Message) -> Message:
        now = trio.current_time()
        answer = Message(type=question.type, key=question.key)
        if question.type == Message.ADD_PROVIDER:
            if not self._announcements.of(peer, now).take(now):
                raise RemoteProtocolError("too many announcements")
            for provider, addresses in _peers(question.providerPeers):
                if provider == peer:  # a peer may announce only itself
                    self._records.add(question.key, provider, addresses, now)
            return answer
        if question.type == Message.GET_PROVIDERS:
            own = question.key.removeprefix(_MULTIHASH_PREFIX) in self._announced_at
            kept = self._records.of(question.key, now)[: BUCKET_SIZE - own]
            answer.providerPeers.extend(_named(*each) for each in kept)
            if own:
                answer.providerPeers.append(_named(self._dialler.author, self._dialler.own.all))
        if question.type != Message.PING:
            closest = self._table.closest(position_of(question.key), BUCKET_SIZE + 1)
            named = (_named(each, self._dialler.known.of(each)) for each in closest if each != peer)
            answer.closerPeers.extend([each for each in named if each.addrs][:BUCKET_SIZE])
        return answer


def _named(peer: bytes, addresses: Sequence[str]) -> Message.Peer:
    return Message.Peer(id=peer_id_bytes(peer), addrs=multiaddr_bytes(addresses[:MAX_ADDRESSES]))


def _peers(peers: Iterable[Message.Peer]) -> list[PeerAddresses]:
    """Return the peers of a message that have Ed25519 keys; drop more than an honest message has."""
    known: list[PeerAddresses] = []
    for peer in itertools.islice(peers, BUCKET_SIZE):
        with suppress(RemoteProtocolError):
            known.append((public_key_of_bytes(peer.id), multiaddr_texts(peer.addrs)))
    return known


def by_turns(answers: Sequence[Sequence[PeerAddresses]]) -> list[PeerAddresses]:
    """Return the first `MAX_PROVIDERS`, taken from the answers in turn: no answer crowds out the others."""
    found: dict[bytes, list[str]] = {}
    for provider in itertools.chain.from_iterable(itertools.zip_longest(*answers)):
        if provider is not None:
            peer, told = provider
            addresses = found.setdefault(peer, [])
            addresses += [address for address in told if address not in addresses]
            del addresses[MAX_ADDRESSES:]
    return list(found.items())[:MAX_PROVIDERS]
