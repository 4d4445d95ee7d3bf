"""The library's DHT with what it lacks: deadlines on what it serves, and bounds on what it keeps for others."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Final

import trio
from libp2p.abc import INetStream
from libp2p.kad_dht import kad_dht, peer_routing, provider_store
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.kad_dht.pb.kademlia_pb2 import Record
from libp2p.kad_dht.provider_store import ProviderStore
from libp2p.kad_dht.value_store import ValueStore
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from .host import MendedHost

# One inbound stream of the DHT; the library serves twelve at once and would let idle ones keep their places for ever,
# and one peer keep them all.
STREAM_TIMEOUT: Final = 10.0
MAX_STREAMS_PER_PEER: Final = 3
# A question is a key, with a provider's addresses and a signed record of them: a few kilobytes. An answer is 20
# providers and 20 peers with as much each. The library takes 4 MiB of either, and keeps the addresses in it.
MAX_QUESTION_BYTES: Final = 32 * 1024
MAX_ANSWER_BYTES: Final = 512 * 1024
MAX_ADDRESSES: Final = 16
MAX_ADDRESS_BYTES: Final = 512
# Records of providers, and peers with addresses, kept for others; the oldest make room.
MAX_RECORDS: Final = 8_192
MAX_STORED_PEERS: Final = 4_096
# How often providers announce a key again, and how long one that does not is kept: two days in the library, in which a
# run's old checkpoints pile up.
REANNOUNCE_INTERVAL: Final = 3_600.0
RECORD_SECONDS: Final = 3 * REANNOUNCE_INTERVAL

# Constants of the library's, which it reads whenever it comes to them.
vars(kad_dht).update(MAX_DHT_MESSAGE_SIZE=MAX_QUESTION_BYTES)
vars(peer_routing).update(MAX_DHT_MESSAGE_SIZE=MAX_ANSWER_BYTES)
vars(provider_store).update(MAX_DHT_MESSAGE_SIZE=MAX_ANSWER_BYTES, PROVIDER_RECORD_EXPIRATION_INTERVAL=RECORD_SECONDS)


class BoundedProviders(ProviderStore):
    """Keeps the newest records, and of each provider no more addresses than anybody dials."""

    def add_provider(self, key: bytes, provider: PeerInfo) -> None:
        """Keep that it provides the key."""
        super().add_provider(key, PeerInfo(provider.peer_id, _sane(provider.addrs)))
        self.providers[key] = self.providers.pop(key)  # the oldest come first
        while sum(map(len, self.providers.values())) > MAX_RECORDS:
            del self.providers[next(iter(self.providers))]


class NoValues(ValueStore):
    """Keeps nothing: nobody in a run has a value to keep."""

    def put_record(self, key: bytes, record: Record, validity: float = 0.0) -> None:
        """Forget it."""


def _sane(addresses: Iterable[Multiaddr]) -> list[Multiaddr]:
    """The first of them, without those that are too long to be any."""
    short = (address for address in addresses if len(address.to_bytes()) <= MAX_ADDRESS_BYTES)
    return [*itertools.islice(short, MAX_ADDRESSES)]


class BoundedDht(KadDHT):
    """A server."""

    def __init__(self, host: MendedHost) -> None:
        self._served: Counter[ID] = Counter()
        super().__init__(host, DHTMode.SERVER)
        self.provider_store = BoundedProviders(host=host, peer_routing=self.peer_routing)
        self.value_store = NoValues(host=host, local_peer_id=self.local_peer_id)

    async def handle_stream(self, stream: INetStream) -> None:
        """Serve one, for `STREAM_TIMEOUT` at most."""
        peer_id = stream.muxed_conn.peer_id
        if self._served[peer_id] >= MAX_STREAMS_PER_PEER:
            await stream.reset()
            return
        self._served[peer_id] += 1
        try:
            with trio.fail_after(STREAM_TIMEOUT):
                await super().handle_stream(stream)
        finally:
            self._served[peer_id] -= 1
            if not self._served[peer_id]:
                del self._served[peer_id]

    def forget(self) -> None:
        """Drop what has expired, and what grows with every peer ever heard of."""
        self.provider_store.cleanup_expired()
        self._provider_rate_limits.clear()
        peerstore = self.host.get_peerstore()
        keep = {self.local_peer_id, *self.host.get_connected_peers()}
        strangers = [peer_id for peer_id in peerstore.peer_ids() if peer_id not in keep]
        for peer_id in strangers[: max(0, len(strangers) - MAX_STORED_PEERS)]:
            peerstore.clear_peerdata(peer_id)
