"""A node's identity: one Ed25519 key, which is its libp2p identity and its name as an author of run state.

Inside farandole a peer is named by its 32-byte public key; people see the libp2p peer id (libp2p specs, peer-ids.md:
the base58 of the identity multihash of the protobuf-encoded key), and the two convert both ways without a lookup.
"""

from __future__ import annotations

from functools import lru_cache

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from .errors import RemoteProtocolError

PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64
# identity multihash (0x00), its length 36, then protobuf PublicKey{Type: Ed25519 (1), Data: 32 bytes}
_PEER_ID_PREFIX = bytes((0x00, 0x24, 0x08, 0x01, 0x12, 0x20))

# Base 58 takes Python 0.1 ms per name, and a display of a run of thousands of nodes needs all names every second.
MAX_NAMES_REMEMBERED = 8_192

# The eight points of order 1, 2, 4 or 8 in every encoding that OpenSSL decodes: under them one constant signature
# verifies for any message (seen: the identity key accepted a forgery for 64 of 64 messages). RFC 8032, 5.1.7, and
# "Taming the many EdDSAs" (eprint 2020/1244), table 1.
_P = 2**255 - 19
_SMALL_ORDER_Y = (
    0,
    1,
    _P - 1,
    _P,
    _P + 1,
    int.from_bytes(bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little"),
    int.from_bytes(bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"), "little"),
)


# Both points with each y coordinate.
SMALL_ORDER_KEYS = frozenset(point.to_bytes(32, "little") for y in _SMALL_ORDER_Y for point in (y, y | 1 << 255))


@lru_cache(maxsize=MAX_NAMES_REMEMBERED)
def peer_id_of(public_key: bytes) -> str:
    """Return the libp2p peer id (text, ``12D3KooW...``) of a 32-byte Ed25519 public key."""
    if len(public_key) != PUBLIC_KEY_BYTES:
        raise ValueError(f"an Ed25519 public key has {PUBLIC_KEY_BYTES} bytes, this has {len(public_key)}")
    return base58.b58encode(_PEER_ID_PREFIX + public_key).decode("ascii")


def public_key_of(peer_id: str) -> bytes:
    """Return the public key in a peer id's text; raise `RemoteProtocolError` if it is not the id of an Ed25519 key."""
    if len(peer_id) > 64:
        raise RemoteProtocolError("not a peer id: too long")
    try:
        raw = base58.b58decode(peer_id)
    except ValueError as error:
        raise RemoteProtocolError(f"not a peer id: {peer_id!r}") from error
    return public_key_of_bytes(raw)


def peer_id_bytes(public_key: bytes) -> bytes:
    """Return the peer id in the form that libp2p's messages use."""
    return _PEER_ID_PREFIX + public_key


def public_key_of_bytes(peer_id: bytes) -> bytes:
    """Return the public key in a peer id's bytes; raise `RemoteProtocolError` if it is not the id of an Ed25519 key."""
    if len(peer_id) != len(_PEER_ID_PREFIX) + PUBLIC_KEY_BYTES or not peer_id.startswith(_PEER_ID_PREFIX):
        raise RemoteProtocolError(f"not the peer id of an Ed25519 key: {base58.b58encode(peer_id[:64]).decode()!r}")
    return peer_id[len(_PEER_ID_PREFIX) :]


def short_name(public_key: bytes) -> str:
    """Return the last eight characters of the peer id, as tables and logs show them."""
    return peer_id_of(public_key)[-8:]


def with_name(peer_id: str, name: str) -> str:
    """Return the end of a peer id and, in quotes, the name that the peer gives itself: anyone may take any name."""
    return f'{peer_id[-8:]} "{name}"' if name else peer_id[-8:]


def framed(domain: bytes, *parts: bytes) -> bytes:
    """Return a length-prefixed concatenation, unique for each sequence of parts (libp2p RFC 0002)."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in (domain, *parts))


def public_bytes(key: Ed25519PrivateKey) -> bytes:
    """Return the 32-byte public key of a private key."""
    return key.public_key().public_bytes_raw()


def sign(key: Ed25519PrivateKey, domain: bytes, *parts: bytes) -> bytes:
    """Sign the framed parts; return 64 bytes."""
    return key.sign(framed(domain, *parts))


def is_signed_by(public_key: bytes, signature: bytes, domain: bytes, *parts: bytes) -> bool:
    """Return whether the signature is valid for the framed parts and the key is not of small order."""
    if len(public_key) != PUBLIC_KEY_BYTES or len(signature) != SIGNATURE_BYTES or public_key in SMALL_ORDER_KEYS:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, framed(domain, *parts))
    except (InvalidSignature, ValueError):
        return False
    return True
