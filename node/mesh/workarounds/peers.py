"""The library's store of peers with bounds: strangers fill it, by what they say of themselves and of others."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from typing import Final

from libp2p.peer.envelope import Envelope
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from multiaddr import Multiaddr

# Of one peer: more are never dialled. A relayed one of IPv6 has a hundred bytes, one with a name at most 255 more. The
# library compares each new address with all that it has.
MAX_ADDRESSES: Final = 16
MAX_ADDRESS_BYTES: Final = 384
# A peer's signed record of its own addresses, which goes into every answer about it.
MAX_RECORD_BYTES: Final = 4 * 1024
# Run members and strangers, 10 KB each at most; those of whom nothing was heard for longest make room, many at once, as
# finding them means looking at all.
MAX_STORED_PEERS: Final = 2_048
KEPT_SHARE: Final = 7 / 8


def first_sane(addresses: Iterable[bytes]) -> list[bytes]:
    """As many as a peer may have, without those that are too long to be any."""
    return [*itertools.islice((each for each in addresses if len(each) <= MAX_ADDRESS_BYTES), MAX_ADDRESSES)]


class BoundedPeers(PeerStore):
    """Keeps this host's own keys, whatever comes."""

    def __init__(self, own: ID) -> None:
        super().__init__(max_records=MAX_STORED_PEERS, max_peers=MAX_STORED_PEERS)
        self._own = own

    def add_addrs(self, peer_id: ID, addrs: Sequence[Multiaddr], ttl: int = 0) -> None:
        """Keep the newest addresses of a peer."""
        data = self.peer_data_map.get(peer_id)
        known = [] if data is None else data.addrs
        told = map(Multiaddr, first_sane(address.to_bytes() for address in addrs))
        new = [address for address in told if address not in known]
        del known[: max(0, len(known) + len(new) - MAX_ADDRESSES)]
        super().add_addrs(peer_id, new, ttl)

    def consume_peer_record(self, envelope: Envelope, ttl: int) -> bool:
        """Keep a peer's signed record; False if it is not better than what is kept, or far too long."""
        return len(envelope.raw_payload) <= MAX_RECORD_BYTES and super().consume_peer_record(envelope, ttl)

    def _enforce_peer_limit(self) -> None:
        if len(self.peer_data_map) <= self.max_peers:
            return
        heard_at = {peer: data.last_identified for peer, data in self.peer_data_map.items() if peer != self._own}
        num_too_many = len(self.peer_data_map) - round(KEPT_SHARE * self.max_peers)
        for peer_id in heapq.nsmallest(num_too_many, heard_at, key=heard_at.__getitem__):
            self.clear_peerdata(peer_id)
