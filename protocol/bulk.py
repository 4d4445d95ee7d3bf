"""Bulk: how two peers agree on a TCP connection of their own, beside libp2p's, for contributions.

    asker   Proposal              answerer   Proposal         over a libp2p stream, which has authenticated both
    both    dial each other, and greet with `greeting`        in clear, over each TCP connection that opens
    answerer chooses one of them, and is the server of TLS 1.3 on it

libp2p's Noise and yamux take several times the processor time of OpenSSL, and hold the interpreter's lock meanwhile.
A `Proposal` carries its sender's certificate, made for this life of the node: each end accepts that very certificate
and no other, so the connection leads to the peer as surely as the stream did on which it was agreed. The greeting (the
session and the receiver's one-time token) keeps strangers away from the TLS handshake, and makes a plain dial, a
reverse dial and a simultaneous open look alike; who reads it on the wire could take its sender's place in the race,
then fails the handshake, and the contributions move over the libp2p stream.

A peer's word alone makes no node dial into its own network: see `dialable`.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable
from typing import Annotated

import msgspec

from .errors import RemoteProtocolError

BULK_VERSION = 1
SESSION_BYTES = 16
TOKEN_BYTES = 32
GREETING_BYTES = SESSION_BYTES + TOKEN_BYTES
# A self-signed certificate of a P-256 key and a short name has about 350 bytes.
MAX_CERTIFICATE_BYTES = 1_024
# A machine has a few interfaces in two families, and an address outside its NAT.
MAX_OFFERED = 8
# The longest IPv6 address in words, an IPv4 one in its last part.
MAX_IP_CHARS = 45
# Eight addresses of 50 bytes, the certificate, and two ids.
MAX_PROPOSAL_BYTES = 2_048
# Below are the ports of system services; nobody is to be made to knock there.
MIN_PORT = 1_024
# Addresses that lie in one network of this size are each other's neighbours.
_NEIGHBOURHOOD = {4: 24, 6: 64}

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Address = tuple[
    Annotated[str, msgspec.Meta(min_length=2, max_length=MAX_IP_CHARS)],
    Annotated[int, msgspec.Meta(ge=MIN_PORT, le=65_535)],
]
"""An IP address in words, and a TCP port."""


class Proposal(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """Where its sender can be dialled, and what proves either end to the other."""

    version: Annotated[int, msgspec.Meta(ge=BULK_VERSION, le=BULK_VERSION)] = BULK_VERSION
    session: Annotated[bytes, msgspec.Meta(min_length=SESSION_BYTES, max_length=SESSION_BYTES)]
    """Chosen by the asker; the channel's name from then on."""
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    """Random; greetings that reach the sender must show it."""
    certificate: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_CERTIFICATE_BYTES)]
    """DER; the sender's end of the TLS connection shows this very one."""
    addresses: Annotated[list[Address], msgspec.Meta(max_length=MAX_OFFERED)]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Proposal)


def encode_proposal(proposal: Proposal) -> bytes:
    """The proposal's bytes, at most `MAX_PROPOSAL_BYTES`."""
    return _encoder.encode(proposal)


def decode_proposal(payload: bytes) -> Proposal:
    """The proposal in a frame; `RemoteProtocolError` if there is none."""
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"not a proposal: {error}") from error


def greeting(session: bytes, token: bytes) -> bytes:
    """What both ends write first on a TCP connection; ``token`` is that of the end which reads it."""
    return session + token


def is_greeting(received: bytes, session: bytes, token: bytes) -> bool:
    """Whether these are the greeting's bytes, in constant time."""
    return hmac.compare_digest(received, greeting(session, token))


def dialable(offered: Iterable[Address], in_use: Iterable[str]) -> list[Address]:
    """Which addresses to dial for a channel with a peer, the likeliest first, at most `MAX_OFFERED`.

    ``in_use`` are the IP addresses that our own connections with the peer lead to. Dialled are these, with each port
    offered (a NAT that keeps ports has mapped it there); addresses on the internet; and any other only next to one in
    use, in the same /24 or /64: then the peer sits in that network as we do, or on this machine.
    """
    used = [ip for ip in map(_parse, in_use) if ip is not None]
    parsed = [(ip, port) for text, port in offered if (ip := _parse(text)) is not None and port >= MIN_PORT]
    chosen = [(ip, port) for ip in used for _, port in parsed]
    chosen += [(ip, port) for ip, port in parsed if ip.is_global or any(_are_neighbours(ip, other) for other in used)]
    return [(str(ip), port) for ip, port in dict.fromkeys(chosen)][:MAX_OFFERED]


def _parse(text: str) -> IpAddress | None:
    """A unicast address; one of IPv4 in IPv6's clothes is taken out of them, a zone is no part of it."""
    try:
        ip = ipaddress.ip_address(text)
    except ValueError:
        return None
    if ip.version == 6:
        if ip.scope_id is not None:
            return None
        ip = ip.ipv4_mapped or ip
    return None if ip.is_unspecified or ip.is_multicast else ip


def _are_neighbours(ip: IpAddress, other: IpAddress) -> bool:
    if ip.version != other.version:
        return False
    shift = ip.max_prefixlen - _NEIGHBOURHOOD[ip.version]
    return int(ip) >> shift == int(other) >> shift
