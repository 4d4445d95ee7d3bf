"""Bulk: how two peers agree on a TCP connection of their own, beside libp2p's, for contributions.

    asker    Proposal              answerer   Proposal        over a libp2p stream, which has authenticated both
    both     dial each other, and greet with `greeting`       in clear, over each TCP connection that opens
    answerer chooses one of them
    asker    ready                 answerer   ready           in records (`farandole.protocol.record_layer`) on that one

libp2p's Noise and yamux take several times the processor time of these records, and hold the interpreter's lock
meanwhile. The records' keys come from the proposals (`agree`), and who they are for from the stream:

- Noise says who sent a proposal, and that nobody changed it or read it. Whoever can seal a record is that peer.
- A proposal's X25519 key is of one negotiation. Nobody can find the channel's keys once both have forgotten theirs.
- The keys hang on the run, the hash of the Noise handshake of the stream's connection, both peers' names, both
  proposals' keys and tokens, the session and the direction. So a peer that passes another's proposal on, over another
  connection or in another run, or an end that hears itself, gets different keys or none.
- Before a channel is used each end opens the other's first record, so both have the same keys.
- Who sits on the path, and so reads the greeting, can take a peer's place in the race or break the connection; then
  the contributions move over another channel, or the libp2p stream. He sees how much moves when, and nothing else.

docs/bulk-channel.md is the specification, and says who may learn or break what.

The greeting (the session and the receiver's one-time token) keeps strangers away from the channel, and makes a plain
dial, a reverse dial and a simultaneous open look alike.

A peer's word alone makes no node dial into its own network: see `dialable`.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable
from typing import Annotated, NamedTuple

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from .errors import RemoteProtocolError
from .identity import framed
from .record_layer import SECRET_BYTES
from .wire import MessageDecoder

BULK_VERSION = 3
SESSION_BYTES = 16
TOKEN_BYTES = 32
GREETING_BYTES = SESSION_BYTES + TOKEN_BYTES
PUBLIC_KEY_BYTES = 32
# A machine has a few interfaces in two families, and an address outside its NAT.
MAX_OFFERED = 8
# The longest IPv6 address in words, an IPv4 one in its last part.
MAX_IP_CHARS = 45
# Eight addresses of 50 bytes, a key, and two ids.
MAX_PROPOSAL_BYTES = 1_024
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
    """Where its sender can be dialled, and its half of the channel's keys."""

    version: Annotated[int, msgspec.Meta(ge=BULK_VERSION, le=BULK_VERSION)] = BULK_VERSION
    session: Annotated[bytes, msgspec.Meta(min_length=SESSION_BYTES, max_length=SESSION_BYTES)]
    """Chosen by the asker; the channel's name from then on."""
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    """Random; greetings that reach the sender must show it."""
    key: Annotated[bytes, msgspec.Meta(min_length=PUBLIC_KEY_BYTES, max_length=PUBLIC_KEY_BYTES)]
    """An X25519 public key, made for this negotiation."""
    addresses: Annotated[list[Address], msgspec.Meta(max_length=MAX_OFFERED)]


decode_proposal = MessageDecoder[Proposal](Proposal, "a proposal")


class Side(NamedTuple):
    """One end of a negotiation: who it is, and what it proposes."""

    author: bytes
    proposal: Proposal


class Binding(NamedTuple):
    """What a negotiation belongs to: channels of different ones have different keys."""

    run_id: bytes
    handshake_hash: bytes
    """Of the connection whose stream carries the proposals: 32 bytes, which both of its ends know and no others have
    (Noise, section 11.2: channel binding)."""


class Secrets(NamedTuple):
    """What a channel's records are sealed and opened with, 32 bytes each; the other end has them reversed."""

    sealing: bytes
    opening: bytes


def agree(own_key: X25519PrivateKey, ours: Side, theirs: Side, binding: Binding, is_asker: bool) -> Secrets:
    """The secrets of both directions, of the key that `ours` proposes and the other's.

    X25519 (RFC 7748) and HKDF-SHA256 (RFC 5869). Raises `RemoteProtocolError` if the other's key is of small order.
    """
    asker, answerer = (ours, theirs) if is_asker else (theirs, ours)
    try:
        shared = own_key.exchange(X25519PublicKey.from_public_bytes(theirs.proposal.key))
    except ValueError as error:
        raise RemoteProtocolError("a key of small order") from error
    named = [part for side in (asker, answerer) for part in (side.author, side.proposal.key, side.proposal.token)]
    info = framed(b"farandole/bulk/3", *binding, *named)
    both = HKDF(SHA256(), 2 * SECRET_BYTES, salt=asker.proposal.session, info=info).derive(shared)
    by_asker, by_answerer = both[:SECRET_BYTES], both[SECRET_BYTES:]
    return Secrets(by_asker, by_answerer) if is_asker else Secrets(by_answerer, by_asker)


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
    used = [ip for ip in map(unicast_ip, in_use) if ip is not None]
    parsed = [(ip, port) for text, port in offered if (ip := unicast_ip(text)) is not None and port >= MIN_PORT]
    chosen = [(ip, port) for ip in used for _, port in parsed]
    chosen += [(ip, port) for ip, port in parsed if ip.is_global or any(are_neighbours(ip, other) for other in used)]
    return [(str(ip), port) for ip, port in dict.fromkeys(chosen)][:MAX_OFFERED]


def unicast_ip(text: str) -> IpAddress | None:
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


def are_neighbours(ip: IpAddress, other: IpAddress) -> bool:
    """Whether two addresses lie in the same /24 or /64."""
    if ip.version != other.version:
        return False
    shift = ip.max_prefixlen - _NEIGHBOURHOOD[ip.version]
    return int(ip) >> shift == int(other) >> shift
