"""Known answers of the bulk channel: the code, and a second derivation from docs/bulk-channel.md alone.

After a new version of the protocol: `BULK_VECTORS=write pytest tests/protocol/exchange/test_bulk_vectors.py` writes the
second derivation's answers to the file.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from farandole.protocol.exchange.bulk import BULK_VERSION, Proposal, Secrets, Side, agree, greeting
from farandole.protocol.wire.framing import frame
from farandole.protocol.wire.messagepack import encode
from farandole.protocol.wire.record_layer import Sealer

VECTORS = Path(__file__).parent / "vectors" / "bulk_channel.json"
RUN_ID, HANDSHAKE_HASH, SESSION = b"R" * 32, b"H" * 32, bytes(range(16))
# Each end: identity, X25519 private key, token.
ASKER = bytes([0xA0]) * 32, bytes(range(32)), bytes([0xA1]) * 32
ANSWERER = bytes([0xB0]) * 32, bytes(range(32, 64)), bytes([0xB1]) * 32
# The asker's records: plaintext, and seconds since the channel opened. A key lasts ten seconds and 60 bytes here.
MAX_BYTES, MAX_SECONDS = 60, 10.0
SENT = [(b"ready", 0.0), (b"first", 1.0), (b"beyond 60 bytes", 2.0), (b"late", 12.0), (b"", 12.0)]


def expand(secret: bytes, info: bytes, size: int) -> bytes:
    """HKDF-Expand (RFC 5869, 2.3)."""
    blocks = [b""]
    while len(b"".join(blocks)) < size:
        blocks.append(hmac.digest(secret, blocks[-1] + info + bytes([len(blocks)]), hashlib.sha256))
    return b"".join(blocks)[:size]


def framed(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def public(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def derive() -> dict[str, object]:
    """Derive all values as the page describes them."""
    theirs = X25519PublicKey.from_public_bytes(public(ANSWERER[1]))
    shared = X25519PrivateKey.from_private_bytes(ASKER[1]).exchange(theirs)
    ends = [part for identity, private, token in (ASKER, ANSWERER) for part in (identity, public(private), token)]
    info = framed(b"farandole/bulk/3", RUN_ID, HANDSHAKE_HASH, *ends)
    secrets = expand(hmac.digest(SESSION, shared, hashlib.sha256), info, 64)
    secret, records, keys = secrets[:32], [], []
    num_bytes = began_at = 0.0
    for number, (plaintext, now) in enumerate(SENT):
        size = len(plaintext) + 20
        is_next = bool(number) and (now - began_at >= MAX_SECONDS or num_bytes + size > MAX_BYTES)
        if is_next:
            secret = expand(secret, b"farandole/record/2 next secret", 32)
            num_bytes, began_at = 0, now
        num_bytes += size
        key = expand(secret, b"farandole/record/2 key", 32)
        header = (len(plaintext) + 16 + (2**31 if is_next else 0)).to_bytes(4, "big")
        records.append(header + AESGCM(key).encrypt(number.to_bytes(12, "big"), plaintext, header))
        keys.append(key)
    return {
        "shared": shared.hex(),
        "info": info.hex(),
        "secret of the asker": secrets[:32].hex(),
        "secret of the answerer": secrets[32:].hex(),
        "keys of the asker's records": [key.hex() for key in keys],
        "the asker's records": [record.hex() for record in records],
        "the asker's greeting": (SESSION + ANSWERER[2]).hex(),
    }


def proposal(end: tuple[bytes, bytes, bytes]) -> Proposal:
    return Proposal(session=SESSION, token=end[2], key=public(end[1]), addresses=[("192.0.2.1", 4_001)])


def test_a_second_derivation_gives_the_answers_that_are_kept() -> None:
    answers = {"version": BULK_VERSION, "the asker's proposal": frame(encode(proposal(ASKER)), 1_024).hex(), **derive()}
    if os.environ.get("BULK_VECTORS") == "write":
        VECTORS.write_text(json.dumps(answers, indent=1) + "\n")
    assert json.loads(VECTORS.read_text()) == answers


def test_the_code_gives_the_answers_that_are_kept() -> None:
    answers = json.loads(VECTORS.read_text())
    ours, theirs = Side(ASKER[0], proposal(ASKER)), Side(ANSWERER[0], proposal(ANSWERER))
    binding = RUN_ID, HANDSHAKE_HASH
    secrets = agree(X25519PrivateKey.from_private_bytes(ASKER[1]), ours, theirs, binding, is_asker=True)
    reverse = agree(X25519PrivateKey.from_private_bytes(ANSWERER[1]), theirs, ours, binding, is_asker=False)
    assert (reverse.opening, reverse.sealing) == secrets
    assert secrets == Secrets(
        bytes.fromhex(answers["secret of the asker"]), bytes.fromhex(answers["secret of the answerer"])
    )
    assert greeting(SESSION, ANSWERER[2]).hex() == answers["the asker's greeting"]
    sealer = Sealer(secrets.sealing, 0.0, max_bytes=MAX_BYTES, max_seconds=MAX_SECONDS)
    records = [bytes(sealer.seal(memoryview(data), now) if data else sealer.finish(now)) for data, now in SENT]
    assert [record.hex() for record in records] == answers["the asker's records"]
