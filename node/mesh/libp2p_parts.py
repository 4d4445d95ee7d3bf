"""The parts of py-libp2p that a node uses: Noise's handshake, the protobuf messages, peer ids and varints.

Python runs a package before any module of it, and the packages of libp2p import everything: QUIC, TLS certificates,
HTTP and DNS clients, 0.3 s of a processor at each start and 26 MB. So the packages that do are in place while their
modules are imported, but have not run. Only this module imports libp2p.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec, module_from_spec
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message
from multiaddr import Multiaddr

from farandole.protocol.wire.errors import RemoteProtocolError

from ..base.streams import Stream, read_delimited
from .addresses import MAX_ADDRESS_BYTES, MAX_ADDRESSES, is_multiaddr

# Packages that import what no node needs; each after the one that it is in.
_PACKAGES: Final = (
    "libp2p",
    "libp2p.identity",
    "libp2p.identity.identify",
    "libp2p.kad_dht",
    "libp2p.relay",
    "libp2p.relay.circuit_v2",
    "libp2p.security",
    "libp2p.transport",
    "libp2p.transport.quic",
)


@contextmanager
def _packages_not_run() -> Iterator[None]:
    """Put the packages in place while the block runs; a later import gets all of it."""
    added: list[str] = []
    for name in _PACKAGES:
        if name not in sys.modules and (spec := find_spec(name)) is not None:
            sys.modules[name] = module_from_spec(spec)
            added.append(name)
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


with _packages_not_run():
    from libp2p.abc import IRawConnection as IRawConnection
    from libp2p.abc import ISecureConn as ISecureConn
    from libp2p.crypto.ed25519 import create_new_key_pair as create_new_key_pair
    from libp2p.crypto.x25519 import create_new_key_pair as create_new_x25519_key_pair
    from libp2p.identity.identify.pb.identify_pb2 import Identify as Identify
    from libp2p.kad_dht.pb.kademlia_pb2 import Message as DhtMessage
    from libp2p.peer.id import ID as ID
    from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage as HopMessage
    from libp2p.relay.circuit_v2.pb.circuit_pb2 import PeerId as PeerId
    from libp2p.relay.circuit_v2.pb.circuit_pb2 import Reservation as Reservation
    from libp2p.relay.circuit_v2.pb.circuit_pb2 import Status as RelayStatus
    from libp2p.relay.circuit_v2.pb.circuit_pb2 import StopMessage as StopMessage
    from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch as HolePunch
    from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey as PeerIDMismatchesPubkey
    from libp2p.security.noise.io import NoiseTransportReadWriter as NoiseTransportReadWriter
    from libp2p.security.noise.transport import Transport as Noise
    from libp2p.security.secure_session import SecureSession as SecureSession
    from libp2p.utils.varint import encode_delim as encode_delim
    from libp2p.utils.varint import encode_varint_prefixed as encode_varint_prefixed

# The library logs every fault of every peer, at any level; the important ones are logged in this package.
if "LIBP2P_DEBUG" not in os.environ:
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)

__all__ = ["DhtMessage", "Noise", "RelayStatus", "create_new_x25519_key_pair"]  # what has another name here

# Protobuf messages on a stream, each prefixed with its length as a varint, as in libp2p's protocols.

M = TypeVar("M", bound=Message)


def encode_delimited(message: Message) -> bytes:
    """Return a message with its length in front."""
    return encode_varint_prefixed(message.SerializeToString())


async def next_message(stream: Stream, kind: type[M], max_bytes: int) -> M | None:
    """Return the next message, or None at the end of the stream; `RemoteProtocolError` for anything else."""
    payload = await read_delimited(stream.receive_some, max_bytes)
    if payload is None:
        return None
    message = kind()
    try:
        message.ParseFromString(payload)
    except DecodeError as error:
        raise RemoteProtocolError(f"not a {kind.__name__}") from error
    return message


async def receive_message(stream: Stream, kind: type[M], max_bytes: int) -> M:
    """Return the next message, as `next_message`; the end of the stream is an error."""
    message = await next_message(stream, kind, max_bytes)
    if message is None:
        raise RemoteProtocolError("the stream ended before its message")
    return message


def multiaddr_bytes(addresses: Iterable[str]) -> list[bytes]:
    """Encode multiaddrs as messages carry them."""
    return [Multiaddr(address).to_bytes() for address in addresses]


def multiaddr_texts(addresses: Iterable[bytes]) -> list[str]:
    """Decode the first `MAX_ADDRESSES` multiaddrs of a message as text; skip invalid and too long ones."""
    texts: list[str] = []
    for address in addresses:
        if len(texts) == MAX_ADDRESSES:
            break
        # The library raises many kinds of errors for bytes that are no address.
        with suppress(Exception):
            if len(address) <= MAX_ADDRESS_BYTES and is_multiaddr(text := str(Multiaddr(address))):
                texts.append(text)
    return texts
