"""The key of a private run: a peer without it can neither read nor forge a connection's first byte.

    A -> B: nonce of A (32 bytes)      B -> A: nonce of B, at the same time
    then every byte of A xor ChaCha20(HKDF-SHA256(network key, salt = nonce of A)), and of B with the nonce of B

Everything else, Noise included, comes after that. Noise alone authenticates the peer and protects integrity. A peer
without the key sees random bytes, and the bytes that it sends decrypt to none of the protocols. libp2p's private
networks work in this way (specs, pnet/Private-Networks-PSK-V1.md); here ChaCha20 (RFC 8439) takes the place of
XSalsa20, and keys derived per connection (RFC 5869) the place of its longer nonce.
"""

from __future__ import annotations

from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

NETWORK_KEY_BYTES: Final = 32
NONCE_BYTES: Final = 32


def network_key_of(creator: Ed25519PrivateKey, run_id: bytes) -> bytes:
    """Derive the key of a private run, 32 bytes. The creator can derive it again at any time."""
    return _derive(creator.private_bytes_raw(), run_id, b"farandole/private/run/1")


def cipher_of(network_key: bytes, nonce: bytes) -> CipherContext:
    """Return the cipher that encrypts and decrypts the bytes sent by the end that drew this nonce."""
    key = _derive(network_key, nonce, b"farandole/private/connection/1")
    return Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()


def _derive(secret: bytes, salt: bytes, purpose: bytes) -> bytes:
    return HKDF(SHA256(), NETWORK_KEY_BYTES, salt, purpose).derive(secret)
