"""DCUtR's messages on the wire, as libp2p generates them: addresses, and the word that says when to dial."""

from __future__ import annotations

import ipaddress
import re

from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch
from multiaddr import Multiaddr

from farandole.protocol.errors import RemoteProtocolError
from farandole.protocol.punching import MAX_MESSAGE_BYTES, MAX_OFFERED
from farandole.protocol.reachability import Address
from farandole.protocol.relay import MAX_ADDRESS_BYTES

from ..base.streams import Stream
from .addresses import multiaddr_of
from .delimited import encode_delimited, multiaddr_bytes, parse, receive_delimited

_IP_AND_PORT = re.compile(r"/ip[46]/([^/]+)/tcp/(\d{1,5})(?:/p2p/[^/]+)?", re.ASCII)


def encode_connect(addresses: list[Address]) -> bytes:
    """Where I may be met."""
    observed = multiaddr_bytes(multiaddr_of(*address) for address in addresses)
    return encode_delimited(HolePunch(type=HolePunch.CONNECT, ObsAddrs=observed))


def encode_sync() -> bytes:
    """Dial now."""
    return encode_delimited(HolePunch(type=HolePunch.SYNC))


async def receive_connect(stream: Stream) -> list[Address] | None:
    """Where the peer may be met, or None if it says no more; `RemoteProtocolError` for anything else."""
    first = await stream.receive_some(1)
    if not first:
        return None
    message = parse(HolePunch, await receive_delimited(stream, MAX_MESSAGE_BYTES, bytes(first)))
    if message.type != HolePunch.CONNECT:
        raise RemoteProtocolError("not where to connect")
    found = (_address_in(raw) for raw in message.ObsAddrs[:MAX_OFFERED] if len(raw) <= MAX_ADDRESS_BYTES)
    return [address for address in found if address is not None]


async def receive_sync(stream: Stream) -> None:
    """The word to dial; `RemoteProtocolError` for anything else."""
    if parse(HolePunch, await receive_delimited(stream, MAX_MESSAGE_BYTES)).type != HolePunch.SYNC:
        raise RemoteProtocolError("not the word to dial")


def _address_in(raw: bytes) -> Address | None:
    """The IP address and TCP port of a multiaddr's bytes, if it has no more than these."""
    try:
        match = _IP_AND_PORT.fullmatch(str(Multiaddr(raw)))
        return None if match is None else (str(ipaddress.ip_address(match[1])), int(match[2]))
    except Exception:  # the library parses hostile bytes with whatever exception comes
        return None
