"""An invite: one printable string that is all a volunteer needs to join a run.

    farandole1 <base32 of msgpack and its CRC-32, lower case>

It names the run by its id, so the peers at the bootstrap addresses cannot pass off another run. Base32 survives every
channel (chat, paper, a URL, a phone). The checksum is a CRC, not a hash: a CRC detects *every* error that spans up to
32 bits, so each single wrong letter and each swap of neighbours, with certainty. It guards against accidents only; the
run id guards the rest.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import string
import zlib
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ..wire.errors import ManifestError, RemoteProtocolError
from ..wire.identity import PUBLIC_KEY_BYTES, peer_id_of, public_key_of
from .manifest import RUN_ID_BYTES

NETWORK_KEY_BYTES: Final = 32
NONCE_BYTES: Final = 32
PREFIX: Final = "farandole"
VERSION: Final = "1"
# Several, because a single bootstrap peer is other projects' commonest join failure; 8 still fit in a chat line.
MAX_ADDRESSES: Final = 8
# The longest in use, a relayed address under a DNS name, has about 200.
MAX_ADDRESS_CHARS: Final = 256
MAX_ADMISSION_BYTES: Final = 1_024
# 8 addresses, an admission and a network key, all of the longest, in base32.
MAX_INVITE_CHARS: Final = 6_000
_CHECKSUM_BYTES: Final = 4
_ALPHABET: Final = string.ascii_lowercase + "234567"
_WITHOUT_ALPHABET: Final = str.maketrans("", "", _ALPHABET)
_P2P: Final = "/p2p/"


class InviteError(ManifestError):
    """The string is not an invite, or is damaged; the message says so."""


class Invite(msgspec.Struct, frozen=True):
    """A run's id and the addresses to find it at. Raises `InviteError` when a field is out of bounds."""

    run_id: bytes
    """32 bytes."""
    addresses: tuple[str, ...] = ()
    """At most 8 multiaddrs to dial first, each ending in ``/p2p/<peer id>``."""
    admission: bytes = b""
    """What a run of invited members requires; opaque here."""
    network_key: bytes = b""
    """Key of a private run, 32 bytes (`farandole.protocol.run.invite`); empty otherwise."""

    def __post_init__(self) -> None:
        if len(self.run_id) != RUN_ID_BYTES:
            raise InviteError(f"a run id has {RUN_ID_BYTES} bytes, this has {len(self.run_id)}")
        if len(self.addresses) > MAX_ADDRESSES:
            raise InviteError(f"an invite holds at most {MAX_ADDRESSES} addresses, not {len(self.addresses)}")
        if len(self.admission) > MAX_ADMISSION_BYTES:
            raise InviteError(f"an admission has at most {MAX_ADMISSION_BYTES} bytes, not {len(self.admission)}")
        if len(self.network_key) not in (0, NETWORK_KEY_BYTES):
            raise InviteError(f"a network key has {NETWORK_KEY_BYTES} bytes, this has {len(self.network_key)}")
        for address in self.addresses:
            split_address(address)


_Peer = Annotated[bytes, msgspec.Meta(min_length=PUBLIC_KEY_BYTES, max_length=PUBLIC_KEY_BYTES)]


class _Packed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An invite as it is encoded; `Invite` checks the bounds of its fields."""

    run_id: bytes
    bootstrap: tuple[tuple[_Peer, str], ...]
    """Each address with its peer id, which is most of its text, as 32 bytes."""
    admission: bytes
    network_key: bytes = b""


def split_address(address: str) -> tuple[str, bytes]:
    """Return the transport part and the peer's public key of a multiaddr's text.

    Raises `InviteError` unless it reads ``/.../p2p/<id of an Ed25519 key>``. Only libp2p checks what the transport part
    means.
    """
    transport, separator, peer_id = address.rpartition(_P2P)
    if not separator or not transport.startswith("/"):
        raise InviteError(
            f"{address[:80]!r} is no address to dial: it should look like /ip4/1.2.3.4/tcp/4001/p2p/12D3KooW..."
        )
    if len(address) > MAX_ADDRESS_CHARS or not address.isascii() or not address.isprintable() or " " in address:
        raise InviteError(f"an address has at most {MAX_ADDRESS_CHARS} printable characters: {address[:80]!r}")
    try:
        return transport, public_key_of(peer_id)
    except RemoteProtocolError as error:
        raise InviteError(f"the address {address[:80]!r} does not end in a peer id: {error}") from error


def peers_at(addresses: Iterable[str]) -> dict[bytes, list[str]]:
    """Public key -> that peer's addresses among these, in their order. Raises `InviteError` as `split_address` does."""
    peers: dict[bytes, list[str]] = {}
    for address in addresses:
        peers.setdefault(split_address(address)[1], []).append(address)
    return peers


def is_invite(text: str) -> bool:
    """Return whether the text is meant as an invite. It may still be damaged."""
    return text.strip().lower().startswith(PREFIX)


def encode_invite(invite: Invite) -> str:
    """Encode an invite as the string that people pass on."""
    split = (split_address(address) for address in invite.addresses)
    bootstrap = tuple((peer, transport) for transport, peer in split)
    body = msgspec.msgpack.encode(_Packed(invite.run_id, bootstrap, invite.admission, invite.network_key))
    return PREFIX + VERSION + _letters(body)


def decode_invite(text: str) -> Invite:
    """Parse what a person pasted or typed: blanks, line breaks and capitals do not matter.

    Raises `InviteError`, whose message distinguishes a damaged string, one that is no invite, and another version.
    """
    if len(text) > 2 * MAX_INVITE_CHARS:
        raise InviteError(f"an invite has at most {MAX_INVITE_CHARS} characters, this has {len(text)}")
    clean = "".join(text.split()).lower()
    head, letters = clean[: len(PREFIX) + 1], clean[len(PREFIX) + 1 :]
    if not head.startswith(PREFIX):
        raise InviteError(f"not an invite: an invite begins with {PREFIX}{VERSION}")
    if head != PREFIX + VERSION:
        raise InviteError(f"this invite is of another version ({head!r}, this farandole reads {PREFIX}{VERSION})")
    if strange := letters.translate(_WITHOUT_ALPHABET):
        raise InviteError(
            f"the invite is damaged: character {len(head) + letters.index(strange[0]) + 1} is {strange[0]!r}, "
            "but only the letters a-z and the digits 2-7 occur"
        )
    body = b""
    with contextlib.suppress(binascii.Error):  # of a length that no bytes have
        body = base64.b32decode(letters.upper() + "=" * (-len(letters) % 8))[:-_CHECKSUM_BYTES]
    if not body or _letters(body) != letters:  # each invite has one valid spelling
        raise InviteError(
            "the invite is damaged (its checksum does not fit): copy the whole line again, from the first letter to "
            "the last"
        )
    try:
        packed = msgspec.msgpack.decode(body, type=_Packed)
        addresses = tuple(f"{transport}{_P2P}{peer_id_of(peer)}" for peer, transport in packed.bootstrap)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InviteError(f"whoever made this invite made it wrong: {error}") from error
    return Invite(packed.run_id, addresses, packed.admission, packed.network_key)


def _letters(body: bytes) -> str:
    """Return the base32 of an invite's bytes and their checksum."""
    raw = body + zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "big")
    return base64.b32encode(raw).decode("ascii").rstrip("=").lower()


# The key of a private run: a peer without it can neither read nor forge a connection's first byte.
#
#     A -> B: nonce of A (32 bytes)      B -> A: nonce of B, at the same time
#     then every byte of A xor ChaCha20(HKDF-SHA256(network key, salt = nonce of A)), and of B with the nonce of B
#
# Everything else, Noise included, comes after that. Noise alone authenticates the peer and protects integrity. A peer
# without the key sees random bytes, and the bytes that it sends decrypt to none of the protocols. libp2p's private
# networks work in this way (specs, pnet/Private-Networks-PSK-V1.md); here ChaCha20 (RFC 8439) takes the place of
# XSalsa20, and keys derived per connection (RFC 5869) the place of its longer nonce.


def network_key_of(creator: Ed25519PrivateKey, run_id: bytes) -> bytes:
    """Derive the key of a private run, 32 bytes. The creator can derive it again at any time."""
    return _derive(creator.private_bytes_raw(), run_id, b"farandole/private/run/1")


def cipher_of(network_key: bytes, nonce: bytes) -> CipherContext:
    """Return the cipher that encrypts and decrypts the bytes sent by the end that drew this nonce."""
    key = _derive(network_key, nonce, b"farandole/private/connection/1")
    return Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()


def _derive(secret: bytes, salt: bytes, purpose: bytes) -> bytes:
    return HKDF(SHA256(), NETWORK_KEY_BYTES, salt, purpose).derive(secret)
