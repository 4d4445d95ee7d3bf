"""The library's DHT with what it lacks: deadlines on what it serves, and bounds on what it keeps for others."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import trio
from libp2p.abc import INetStream
from libp2p.kad_dht import kad_dht, peer_routing, provider_store
from libp2p.kad_dht.common import BUCKET_SIZE
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.kad_dht.pb.kademlia_pb2 import Message, Record
from libp2p.kad_dht.provider_store import ProviderStore
from libp2p.kad_dht.value_store import ValueStore
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.utils.varint import read_varint_prefixed_bytes_limited

from .host import MAX_ANSWER_BYTES, MendedHost
from .peers import MAX_RECORD_BYTES, first_sane

# One inbound stream of the DHT; the library serves twelve at once and would let idle ones keep their places for ever,
# and one peer keep them all.
STREAM_TIMEOUT: Final = 10.0
MAX_STREAMS_PER_PEER: Final = 3
# A question is a key, with a provider's addresses and a signed record of them: a few kilobytes. The library takes 4 MiB
# of it, and of an answer.
MAX_QUESTION_BYTES: Final = 32 * 1024
# What encloses a peer's signed record: its key and signature.
ENVELOPE_BYTES: Final = 256
# Records of providers, kept for others; the oldest make room.
MAX_RECORDS: Final = 8_192
# How often providers announce a key again, and how long one that does not is kept: two days in the library, in which a
# run's old checkpoints pile up.
REANNOUNCE_INTERVAL: Final = 3_600.0
RECORD_SECONDS: Final = 3 * REANNOUNCE_INTERVAL


async def _read_trimmed(stream: Any, max_bytes: int) -> bytes:
    """Read a message, and leave of it what an honest one may have: the library looks through all with all."""
    message = Message()
    message.ParseFromString(await read_varint_prefixed_bytes_limited(stream, max_bytes))
    if len(message.senderRecord) > MAX_RECORD_BYTES + ENVELOPE_BYTES:
        message.ClearField("senderRecord")
    for peers in (message.closerPeers, message.providerPeers):
        del peers[BUCKET_SIZE:]
        for peer in peers:
            addresses = first_sane(peer.addrs)
            del peer.addrs[:]
            peer.addrs.extend(addresses)
            if len(peer.signedRecord) > MAX_RECORD_BYTES + ENVELOPE_BYTES:
                peer.ClearField("signedRecord")
    return message.SerializeToString()


# Names that the library looks up whenever it comes to them.
for _module, _max_bytes in (
    (kad_dht, MAX_QUESTION_BYTES),
    (peer_routing, MAX_ANSWER_BYTES),
    (provider_store, MAX_ANSWER_BYTES),
):
    vars(_module).update(MAX_DHT_MESSAGE_SIZE=_max_bytes, read_varint_prefixed_bytes_limited=_read_trimmed)
vars(provider_store).update(PROVIDER_RECORD_EXPIRATION_INTERVAL=RECORD_SECONDS)


class BoundedProviders(ProviderStore):
    """Keeps the newest records, of each key and of all."""

    def add_provider(self, key: bytes, provider: PeerInfo) -> None:
        """Keep that it provides the key."""
        of_key = self.providers.setdefault(key, {})
        of_key.pop(str(provider.peer_id), None)  # the oldest come first, here and below
        if len(of_key) >= BUCKET_SIZE:
            del of_key[next(iter(of_key))]  # where the library takes no new one
        super().add_provider(key, provider)
        self.providers[key] = self.providers.pop(key)
        while sum(map(len, self.providers.values())) > MAX_RECORDS:
            del self.providers[next(iter(self.providers))]


class NoValues(ValueStore):
    """Keeps nothing: nobody in a run has a value to keep."""

    def put_record(self, key: bytes, record: Record, validity: float = 0.0) -> None:
        """Forget it."""


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
