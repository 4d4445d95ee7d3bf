"""The messages of Kademlia on the wire: protobuf, as libp2p generates it, each behind its length.

Here they are values of ours, checked: a peer's bytes become a `DhtMessage` or a `RemoteProtocolError`. Peers and
addresses beyond what an honest message names are dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from libp2p.kad_dht.pb.kademlia_pb2 import Message

from farandole.protocol.errors import RemoteProtocolError
from farandole.protocol.identity import peer_id_bytes, public_key_of_bytes
from farandole.protocol.kademlia import BUCKET_SIZE, PeerAddresses

from ..base.streams import Stream
from .delimited import encode_delimited, multiaddr_bytes, multiaddr_texts, parse, receive_delimited
from .known_addresses import MAX_ADDRESS_BYTES, MAX_ADDRESSES

# A question is a key, with a provider's addresses at most: a few kilobytes.
MAX_QUESTION_BYTES: Final = 32 * 1024
# An answer has twenty peers and twenty providers, with as many addresses as anybody dials.
MAX_ANSWER_BYTES: Final = 512 * 1024
MAX_KEY_BYTES: Final = 128


class DhtKind(IntEnum):
    """What is asked; an answer has its question's. Values cannot be kept or asked for here."""

    ADD_PROVIDER = 2
    GET_PROVIDERS = 3
    FIND_NODE = 4
    PING = 5


@dataclass(frozen=True)
class DhtMessage:
    """A question or an answer."""

    kind: DhtKind
    key: bytes = b""
    """A multihash, or the id of the peer to find."""
    closer: tuple[PeerAddresses, ...] = ()
    providers: tuple[PeerAddresses, ...] = ()


def encode_dht(message: DhtMessage) -> bytes:
    """What goes over a stream, with its length."""
    wire = Message(type=message.kind.name, key=message.key)
    for peers, field in ((message.closer, wire.closerPeers), (message.providers, wire.providerPeers)):
        for each in peers:
            addresses = multiaddr_bytes(each.addresses[:MAX_ADDRESSES])
            field.append(Message.Peer(id=peer_id_bytes(each.peer), addrs=addresses))
    return encode_delimited(wire)


async def receive_dht(stream: Stream, max_bytes: int) -> DhtMessage | None:
    """The next message, or None if the peer says no more; `RemoteProtocolError` for anything else."""
    first = await stream.receive_some(1)
    if not first:
        return None
    wire = parse(Message, await receive_delimited(stream, max_bytes, bytes(first)))
    if int(wire.type) not in list(DhtKind) or len(wire.key) > MAX_KEY_BYTES:
        raise RemoteProtocolError("not a question that this DHT answers")
    return DhtMessage(DhtKind(wire.type), wire.key, _peers(wire.closerPeers), _peers(wire.providerPeers))


def _peers(peers: Iterable[Message.Peer]) -> tuple[PeerAddresses, ...]:
    """Those of a message that farandole can name: peers with Ed25519 keys."""
    known: list[PeerAddresses] = []
    for peer in itertools.islice(peers, BUCKET_SIZE):
        with suppress(RemoteProtocolError):
            addresses = multiaddr_texts(peer.addrs, MAX_ADDRESSES, MAX_ADDRESS_BYTES)
            known.append(PeerAddresses(public_key_of_bytes(peer.id), addresses))
    return tuple(known)
