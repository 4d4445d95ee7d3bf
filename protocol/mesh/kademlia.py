"""Kademlia (Maymounkov and Mazieres 2002; github.com/libp2p/specs, kad-dht), the part that finds providers.

This module holds what a node remembers and decides: the routing table, the provider records that it keeps for others,
the course of one lookup, and the keys of what a run's nodes provide. Peers are 32-byte public keys. Distances are
between SHA-256 hashes, as in the specification. Everything that peers fill is bounded.

A key has no values here, since a run needs only providers. The protocol prefix is farandole's own, so its nodes neither
serve nor burden the public DHT of IPFS.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Final

from ..wire.bounds import Latest
from ..wire.identity import framed, peer_id_bytes

KAD_PROTOCOL: Final = "/farandole/kad/1.0.0"
# Peers in one bucket, providers kept of one key, and peers or providers in one answer: the specification's k.
BUCKET_SIZE: Final = 20
# Buckets: the bits of a hash. Almost all peers of any network are in the first twenty.
NUM_BUCKETS: Final = 256
# Queries of one lookup in flight at the same time. The specification's alpha is 3 or 10; a larger one gets past frozen
# peers.
PARALLEL_QUERIES: Final = 20
# Most peers that one lookup asks, since hostile answers can name peers without end.
MAX_QUERIES: Final = 60
# Records of providers, kept for others; the oldest make room.
MAX_RECORDS: Final = 8_192
# How often providers announce a key again, and how long a record is kept that is not announced again.
REANNOUNCE_INTERVAL: Final = 3_600.0
RECORD_SECONDS: Final = 3 * REANNOUNCE_INTERVAL


PeerAddresses = tuple[bytes, list[str]]
"""A peer and the addresses to dial it at, as another peer reports them."""


def position_of(key: bytes) -> int:
    """Return the position of a key, or of a peer by the bytes of its id, in the hash space."""
    return int.from_bytes(hashlib.sha256(key).digest(), "big")


def position_of_peer(peer: bytes) -> int:
    """Return the position of a peer, by its public key."""
    return position_of(peer_id_bytes(peer))


class RoutingTable:
    """The peers that answered, one bucket for each distance. The earliest in a bucket stay, as in Kademlia."""

    def __init__(self, own: bytes) -> None:
        """``own``: this node's public key."""
        self._own = position_of_peer(own)
        self._buckets: dict[int, dict[bytes, int]] = {}  # by the length of the distance in bits; peer -> position

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def add(self, peer: bytes) -> None:
        """Add a peer that has answered, unless its bucket is full."""
        position = position_of_peer(peer)
        distance = position ^ self._own
        if distance:
            bucket = self._buckets.setdefault(distance.bit_length(), {})
            if peer in bucket or len(bucket) < BUCKET_SIZE:
                bucket[peer] = position

    def remove(self, peer: bytes) -> None:
        """Remove a peer that has not answered."""
        for bucket in self._buckets.values():
            bucket.pop(peer, None)

    def closest(self, target: int, count: int = BUCKET_SIZE) -> list[bytes]:
        """Return the peers closest to a position, the closest first."""
        everyone = ((position ^ target, peer) for bucket in self._buckets.values() for peer, position in bucket.items())
        return [peer for _, peer in sorted(everyone)[:count]]


class ProviderRecords:
    """Providers of keys, as peers announce them. The newest records are kept, for each key and in total."""

    def __init__(self) -> None:
        self._records: dict[bytes, Latest[bytes, tuple[list[str], float]]] = {}  # the oldest come first in both

    def __len__(self) -> int:
        return sum(map(len, self._records.values()))

    def add(self, key: bytes, provider: bytes, addresses: list[str], now: float) -> None:
        """Record that a peer provides a key."""
        of_key = self._records[key] = self._records.pop(key, Latest(BUCKET_SIZE))
        of_key[provider] = (addresses, now)
        while len(self) > MAX_RECORDS:
            del self._records[next(iter(self._records))]

    def of(self, key: bytes, now: float) -> list[PeerAddresses]:
        """Return the providers of a key whose records have not expired, the latest last."""
        return [
            (peer, addresses)
            for peer, (addresses, announced_at) in self._records.get(key, {}).items()
            if now < announced_at + RECORD_SECONDS
        ]

    def forget_expired(self, now: float) -> None:
        """Drop what has expired."""
        for key, of_key in list(self._records.items()):
            for peer in [peer for peer, (_, announced_at) in of_key.items() if now >= announced_at + RECORD_SECONDS]:
                del of_key[peer]
            if not of_key:
                del self._records[key]


class Lookup:
    """The search for the peers closest to a position: chooses the peers to ask, until the closest have answered.

    `ask` names peers to ask; `note_answer` or `note_failure` follow for each.
    """

    def __init__(self, target: int, known: Iterable[bytes], own: bytes) -> None:
        self._target = target
        self._own = own
        self._candidates: dict[bytes, int] = {}  # by distance
        self._asked: set[bytes] = set()
        self._waiting: set[bytes] = set()
        self._answered: set[bytes] = set()
        self._add(known)

    @property
    def is_over(self) -> bool:
        """Return whether no peer is left to ask and all have answered or failed."""
        return not self._waiting and not self._next(1)

    @property
    def closest(self) -> list[bytes]:
        """The closest peers that have answered, the closest first."""
        answered = sorted(self._answered, key=lambda peer: position_of_peer(peer) ^ self._target)
        return answered[:BUCKET_SIZE]

    def ask(self) -> list[bytes]:
        """Return the peers to ask now."""
        peers = self._next(PARALLEL_QUERIES - len(self._waiting))
        self._asked.update(peers)
        self._waiting.update(peers)
        return peers

    def note_answer(self, peer: bytes, closer: Sequence[bytes]) -> None:
        """Note that a peer has answered and named others."""
        self._waiting.discard(peer)
        self._answered.add(peer)
        self._add(closer[:BUCKET_SIZE])

    def note_failure(self, peer: bytes) -> None:
        """Note that a peer has not answered."""
        self._waiting.discard(peer)
        self._candidates.pop(peer, None)

    def _add(self, peers: Iterable[bytes]) -> None:
        for peer in peers:
            if peer != self._own and peer not in self._asked:
                self._candidates[peer] = position_of_peer(peer) ^ self._target

    def _next(self, count: int) -> list[bytes]:
        if len(self._asked) >= MAX_QUERIES or count <= 0:
            return []
        closest = sorted(self._candidates, key=self._candidates.__getitem__)[:BUCKET_SIZE]
        return [peer for peer in closest if peer not in self._asked][:count]


def run_key(run_id: bytes) -> bytes:
    """Return 32 bytes, provided by members of the run, which serve its manifest and run state."""
    return hashlib.sha256(framed(b"farandole/run/1", run_id)).digest()


def relay_key(run_id: bytes) -> bytes:
    """Return 32 bytes, provided by publicly reachable nodes that relay for the run's nodes."""
    return hashlib.sha256(framed(b"farandole/relay/1", run_id)).digest()


def file_key(run_id: bytes, file_id: bytes) -> bytes:
    """Return 32 bytes, provided by nodes whose owners' programs serve this file (`farandole.node.programs.mesh`)."""
    return hashlib.sha256(framed(b"farandole/file/1", run_id, file_id)).digest()


def local_name(run_id: bytes) -> str:
    """Return the name by which a run's nodes find each other in a local network.

    It has 16 hexadecimal digits, which reveal nothing of the run's id.
    """
    return hashlib.sha256(framed(b"farandole/local/1", run_id)).hexdigest()[:16]
