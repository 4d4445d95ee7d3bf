"""Bulk: two peers negotiate a direct TCP connection, next to libp2p's, for contributions.

    asker    Proposal              answerer   Proposal        over a libp2p stream, which has authenticated both
    both     dial each other, and greet with `greeting`       over each TCP connection that opens
    answerer chooses one of them
    asker    ready                 answerer   ready           in records (`protocol.wire.record_layer`) on that one

libp2p's Noise and yamux take several times the processor time of these records, and hold the interpreter's lock all
the while. The records' keys come from the proposals (`agree`), and the peers' identities from the stream:

- Noise authenticates the sender of a proposal and encrypts it. Only that peer can seal a record.
- A proposal's X25519 key is used in one negotiation. No one can find the channel's keys once both peers have deleted
  theirs.
- The keys depend on the run, the hash of the Noise handshake of the stream's connection, both peers' names, both
  proposals' keys and tokens, the session and the direction. So a peer that forwards another's proposal, over another
  connection or in another run, or an end that receives its own data, gets different keys or none.
- Before a channel is used each end opens the other's first record, so both have the same keys.
- An attacker on the path, who reads or repeats the greeting, can take a peer's place in the race or break the
  connection; then the contributions move over another channel, or the libp2p stream. They see how much data moves when,
  nothing else.

docs/bulk-channel.md is the specification, with the threat model.

The greeting (the session and the receiver's one-time token) keeps strangers away from the channel, and makes a plain
dial, a reverse dial and a simultaneous open look alike.

In a private run each direction of a connection begins with a nonce, from which both ends derive a cipher of the run's
key (`farandole.protocol.run.invite.cipher_of`). It hides the greeting, the choice, and the records' headers, so whoever
lacks the key sees random bytes, and gets no answer.

A node does not dial into its own network only because a peer asks it to: see `dialable`.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from typing import Annotated, NamedTuple

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ..mesh.dialling import MIN_PORT, Address, may_lead_to, unicast_ip
from ..wire.errors import RemoteProtocolError
from ..wire.identity import framed
from ..wire.messagepack import SESSION_BYTES, MessageDecoder
from ..wire.record_layer import SECRET_BYTES

BULK_VERSION = 3
TOKEN_BYTES = 32
GREETING_BYTES = SESSION_BYTES + TOKEN_BYTES
PUBLIC_KEY_BYTES = 32
# A machine has a few interfaces with IPv4 and IPv6 addresses, and an address outside its NAT.
MAX_OFFERED = 8
# Eight addresses of 50 bytes, a key, and two ids.
MAX_PROPOSAL_BYTES = 1_024


class Proposal(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """The addresses where its sender can be dialled, and its half of the channel's keys."""

    version: Annotated[int, msgspec.Meta(ge=BULK_VERSION, le=BULK_VERSION)] = BULK_VERSION
    session: Annotated[bytes, msgspec.Meta(min_length=SESSION_BYTES, max_length=SESSION_BYTES)]
    """Chosen by the asker; names the channel from then on."""
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    """Random; greetings that reach the sender must contain it."""
    key: Annotated[bytes, msgspec.Meta(min_length=PUBLIC_KEY_BYTES, max_length=PUBLIC_KEY_BYTES)]
    """An X25519 public key, generated for this negotiation."""
    addresses: Annotated[list[Address], msgspec.Meta(max_length=MAX_OFFERED)]


decode_proposal = MessageDecoder[Proposal](Proposal, "a proposal")


class Side(NamedTuple):
    """One end of a negotiation: its identity and its proposal."""

    author: bytes
    proposal: Proposal


class Secrets(NamedTuple):
    """The secrets that seal and open a channel's records, 32 bytes each; the other end has them swapped."""

    sealing: bytes
    opening: bytes


def agree(own_key: X25519PrivateKey, ours: Side, theirs: Side, binding: tuple[bytes, bytes], is_asker: bool) -> Secrets:
    """Derive the secrets of both directions from ``own_key``, the private half of our proposal's key, and their key.

    ``binding``: the run's id, and the hash of the Noise handshake of the connection whose stream carries the proposals,
    which its two ends alone know (Noise, section 11.2: channel binding). Other contexts have other secrets.
    X25519 (RFC 7748) and HKDF-SHA256 (RFC 5869). Raises `RemoteProtocolError` if their key is of small order.
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
    """Return the first bytes that an end writes on a TCP connection; ``token`` is the token of the end that reads."""
    return session + token


def is_greeting(received: bytes, session: bytes, token: bytes) -> bool:
    """Return whether ``received`` is the greeting; compares in constant time."""
    return hmac.compare_digest(received, greeting(session, token))


def dialable(offered: Iterable[Address], in_use: Iterable[str]) -> list[Address]:
    """Return the addresses to dial for a channel with a peer, the likeliest first, at most `MAX_OFFERED`.

    ``in_use``: the remote IP addresses of our connections with the peer. The result has these, with each offered port
    (a NAT that keeps ports has mapped it there); offered addresses on the internet; and other offered addresses only if
    they are in the same /24 or /64 as one in use: then the peer is in that network as we are, or on this machine.
    """
    used = list(in_use)
    parsed = [(ip, port) for text, port in offered if (ip := unicast_ip(text)) is not None and port >= MIN_PORT]
    chosen = [(ip, port) for ip in map(unicast_ip, used) if ip is not None for _, port in parsed]
    chosen += [(ip, port) for ip, port in parsed if may_lead_to(ip, used)]
    return [(str(ip), port) for ip, port in dict.fromkeys(chosen)][:MAX_OFFERED]
