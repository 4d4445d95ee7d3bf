"""The messages of Circuit Relay v2 on the wire: protobuf, as libp2p generates it, each behind its length as a varint.

Here they are values of ours, checked: a peer's bytes become one of these or a `RemoteProtocolError`. A message is read
byte for byte and no further, since what follows on the stream is the circuit's.
"""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.envelope import Envelope, make_unsigned
from libp2p.relay.circuit_v2.pb.circuit_pb2 import (
    HopMessage,
    Limit,
    PeerId,
    Reservation,
    StopMessage,
    Voucher,
)
from libp2p.relay.circuit_v2.pb.circuit_pb2 import Status as WireStatus
from libp2p.relay.circuit_v2.resources import RELAY_RSVP_DOMAIN, VOUCHER_PAYLOAD_TYPE

from farandole.protocol.errors import RemoteProtocolError
from farandole.protocol.identity import peer_id_bytes, public_bytes, public_key_of_bytes
from farandole.protocol.relay import MAX_ADDRESS_BYTES, MAX_MESSAGE_BYTES, MAX_TOLD_ADDRESSES, Status

from ..base.streams import Stream
from .delimited import encode_delimited, multiaddr_bytes, multiaddr_texts, parse, receive_delimited


@dataclass(frozen=True)
class ReserveRequest:
    """To a relay: others shall reach me through you."""


@dataclass(frozen=True)
class ConnectRequest:
    """To a relay: connect me with this peer. To a peer: this one asks for you."""

    peer: bytes
    max_bytes: int = 0
    """What the relay lets through; 0: it does not say."""
    max_seconds: int = 0


@dataclass(frozen=True)
class RelayAnswer:
    """Of a relay, or of a peer to a relay."""

    status: Status | int
    expires_at: int = 0
    """Unix seconds, of a reservation."""
    addresses: tuple[str, ...] = ()
    """Of the relay, where it gave a reservation."""
    voucher: bytes = b""
    max_bytes: int = 0
    max_seconds: int = 0


def encode_hop(message: ReserveRequest | ConnectRequest | RelayAnswer) -> bytes:
    """What goes over a hop stream, with its length."""
    match message:
        case ReserveRequest():
            wire = HopMessage(type=HopMessage.RESERVE)
        case ConnectRequest():
            wire = HopMessage(type=HopMessage.CONNECT, peer=PeerId(id=peer_id_bytes(message.peer)))
        case RelayAnswer():
            wire = HopMessage(
                type=HopMessage.STATUS,
                status=WireStatus.ValueType(message.status),
                reservation=_reservation(message) if message.expires_at else None,
                limit=_limit(message.max_bytes, message.max_seconds),
            )
    return encode_delimited(wire)


def encode_stop(message: ConnectRequest | RelayAnswer) -> bytes:
    """What goes over a stop stream, with its length."""
    match message:
        case ConnectRequest():
            wire = StopMessage(
                type=StopMessage.CONNECT,
                peer=PeerId(id=peer_id_bytes(message.peer)),
                limit=_limit(message.max_bytes, message.max_seconds),
            )
        case RelayAnswer():
            wire = StopMessage(type=StopMessage.STATUS, status=WireStatus.ValueType(message.status))
    return encode_delimited(wire)


async def receive_hop(stream: Stream) -> ReserveRequest | ConnectRequest | RelayAnswer:
    """The next message of a hop stream."""
    wire = parse(HopMessage, await receive_delimited(stream, MAX_MESSAGE_BYTES))
    match wire.type if wire.HasField("type") else None:
        case HopMessage.RESERVE:
            return ReserveRequest()
        case HopMessage.CONNECT:
            return ConnectRequest(public_key_of_bytes(wire.peer.id))
        case HopMessage.STATUS:
            held = wire.reservation
            addresses = multiaddr_texts(held.addrs, MAX_TOLD_ADDRESSES, MAX_ADDRESS_BYTES)
            return RelayAnswer(wire.status, held.expire, addresses, held.voucher, wire.limit.data, wire.limit.duration)
        case _:
            raise RemoteProtocolError("not a hop message")


async def receive_stop(stream: Stream) -> ConnectRequest | RelayAnswer:
    """The next message of a stop stream."""
    wire = parse(StopMessage, await receive_delimited(stream, MAX_MESSAGE_BYTES))
    match wire.type if wire.HasField("type") else None:
        case StopMessage.CONNECT:
            return ConnectRequest(public_key_of_bytes(wire.peer.id), wire.limit.data, wire.limit.duration)
        case StopMessage.STATUS:
            return RelayAnswer(wire.status)
        case _:
            raise RemoteProtocolError("not a stop message")


def sign_voucher(key: Ed25519PrivateKey, peer: bytes, expires_at: int) -> bytes:
    """A relay's word that a peer has a reservation: a signed envelope (libp2p RFC 0002), which others may check."""
    payload = Voucher(relay=peer_id_bytes(public_bytes(key)), peer=peer_id_bytes(peer), expiration=expires_at)
    raw = payload.SerializeToString()
    pair = create_new_key_pair(key.private_bytes_raw())
    signature = pair.private_key.sign(make_unsigned(RELAY_RSVP_DOMAIN, VOUCHER_PAYLOAD_TYPE, raw))
    return Envelope(pair.public_key, VOUCHER_PAYLOAD_TYPE, raw, signature).marshal_envelope()


def _reservation(message: RelayAnswer) -> Reservation:
    return Reservation(expire=message.expires_at, addrs=multiaddr_bytes(message.addresses), voucher=message.voucher)


def _limit(max_bytes: int, max_seconds: int) -> Limit | None:
    return Limit(data=max_bytes, duration=max_seconds) if max_bytes or max_seconds else None
