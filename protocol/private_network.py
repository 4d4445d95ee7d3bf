"""The key of a private run: a peer without it can neither read nor forge a connection's first byte.

    A -> B: nonce of A (32 bytes)      B -> A: nonce of B, at the same time
    then every byte of A xor ChaCha20(HKDF-SHA256(network key, salt = nonce of A)), and of B likewise

All else comes after that, Noise included, which alone proves who is at the other end, and that nothing was changed. A
peer without the key sees random bytes, and what it sends decrypts to none of the protocols. This is how libp2p's
private networks work (specs, pnet/Private-Networks-PSK-V1.md), with ChaCha20 (RFC 8439) in place of XSalsa20, and keys
derived per connection (RFC 5869) in place of its longer nonce.
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
    """The key of a private run, 32 bytes. The creator can derive it again at any time."""
    return _derive(creator.private_bytes_raw(), run_id, b"farandole/private/run/1")


def cipher_of(network_key: bytes, nonce: bytes) -> CipherContext:
    """Encrypts, and decrypts, what the end that sent this nonce sends."""
    key = _derive(network_key, nonce, b"farandole/private/connection/1")
    return Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()


def _derive(secret: bytes, salt: bytes, purpose: bytes) -> bytes:
    return HKDF(SHA256(), NETWORK_KEY_BYTES, salt, purpose).derive(secret)
