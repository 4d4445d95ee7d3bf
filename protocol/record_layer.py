"""The record layer of bulk channels: bytes sealed by AES-256-GCM, record after record, under a key for one direction.

    record      length (4 bytes, big-endian)   ciphertext and tag (as many bytes)

The length is the record's associated data, its number under the key is the nonce. So a record opens only whole, once
and in its turn: one that is flipped, dropped, repeated, swapped, or another channel's, or the other direction's, ends
the channel, and nothing of it counts. An end between two records looks like an end; who waits for more calls it one.

AES with 256 bits, not 128: it costs a tenth of the cipher's rate, which is a fiftieth of the channel's, and nonces may
then count from 0 in each channel: against keys of 128 bits, who records 2^k channels that begin alike would find one
of their keys in 2^(128-k) steps (RFC 8446 has a secret first nonce against that).
"""

from __future__ import annotations

from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from .errors import LocalProtocolError, RemoteProtocolError

SECRET_BYTES: Final = 32
KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
HEADER_BYTES: Final = 4
TAG_BYTES: Final = 16
# Plaintext of a record: enough that what each costs beside its bytes vanishes, little enough that it is still in the
# core's cache when it is decrypted and hashed, and that a lost channel loses little.
RECORD_BYTES: Final = 1 << 18
# What a record needs on the wire beside its plaintext, and the longest record there.
OVERHEAD_BYTES: Final = HEADER_BYTES + TAG_BYTES
MAX_SEALED_BYTES: Final = RECORD_BYTES + OVERHEAD_BYTES
# Records under one key: of full ones 2^30 blocks of AES. RFC 8446 (5.5) allows a key 2^34.5 blocks, for an attacker's
# advantage of 2^-57, RFC 9001 (6.6, B.1) 2^35; NIST SP 800-38D (5.2.1.1, 8.2.1, 8.3) allows 2^36 bytes a record, and as
# many nonces as are counted. A forged record is the last of its channel. It is fewer than need be (16 GiB), so that a
# channel of some use does come to its next key.
RECORDS_PER_KEY: Final = 1 << 16


class _Keys:
    """One key after the other, each with its nonces; from no key can those before be found (as RFC 8446, 7.2)."""

    def __init__(self, secret: bytes, records_per_key: int) -> None:
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a secret has {SECRET_BYTES} bytes, this has {len(secret)}")
        self._secret = secret
        self._records_per_key = records_per_key
        self._begin_key()

    def nonce(self) -> bytes:
        """Of the next record."""
        return self._number.to_bytes(NONCE_BYTES, "big")

    def advance(self) -> None:
        """That record is done."""
        self._number += 1
        if self._number == self._records_per_key:
            self._secret = _expand(self._secret, b"next secret", SECRET_BYTES)
            self._begin_key()

    def _begin_key(self) -> None:
        self.cipher = AESGCM(_expand(self._secret, b"key", KEY_BYTES))
        self._number = 0


class Sealer:
    """Makes records. ``secret``: 32 bytes, shared with the `Opener` and used for nothing else."""

    def __init__(self, secret: bytes, records_per_key: int = RECORDS_PER_KEY) -> None:
        self._keys = _Keys(secret, records_per_key)
        self._buffer = memoryview(bytearray())

    def seal(self, data: memoryview) -> memoryview:
        """The record of 1 to `RECORD_BYTES` bytes, `OVERHEAD_BYTES` longer; good until the next call."""
        if not 0 < data.nbytes <= RECORD_BYTES:
            raise LocalProtocolError(f"a record of {data.nbytes} bytes")
        size = data.nbytes + OVERHEAD_BYTES
        if len(self._buffer) < size:
            self._buffer = memoryview(bytearray(size))
        record = self._buffer[:size]
        record[:HEADER_BYTES] = header = (size - HEADER_BYTES).to_bytes(HEADER_BYTES, "big")
        self._keys.cipher.encrypt_into(self._keys.nonce(), data, header, record[HEADER_BYTES:])
        self._keys.advance()
        return record


class Opener:
    """Reads records: put what comes into `wanted`, note it by `received`, and `take` what is verified.

    No more is wanted than the record that has begun, and the next one's header. After an error it only repeats it.
    """

    def __init__(self, secret: bytes, records_per_key: int = RECORDS_PER_KEY) -> None:
        self._keys = _Keys(secret, records_per_key)
        self._buffer = memoryview(bytearray(2 * HEADER_BYTES))
        self._num_in = (
            0  # bytes from the wire that are in the buffer: a record, or its beginning; a header at most more
        )
        self._size = 0  # of the record on the wire, once its header is in
        self._spare = memoryview(b"")  # plaintext that the last call had no room for
        self._failure: RemoteProtocolError | None = None

    @property
    def is_clean(self) -> bool:
        """Whether all that has come has been taken."""
        return not (self._num_in or self._spare or self._failure)

    @property
    def wanted(self) -> memoryview:
        """Where the next bytes of the wire go, some or all of them; never empty while `take` gives nothing."""
        return self._buffer[self._num_in : (self._size or 0) + HEADER_BYTES]

    def received(self, count: int) -> None:
        """So many have been put there."""
        self._num_in += count

    def take(self, memory: memoryview) -> int:
        """Put what is verified at the front of the memory; how many bytes, 0 if more of the wire is needed first.

        What lies behind them is undefined. Raises `RemoteProtocolError` for a record that the peer has not made so.
        """
        if self._failure is not None:
            raise self._failure
        try:
            return self._take_spare(memory) if self._spare else self._take_record(memory)
        except RemoteProtocolError as error:
            self._failure = error
            raise

    def _take_spare(self, memory: memoryview) -> int:
        count = min(memory.nbytes, len(self._spare))
        memory[:count] = self._spare[:count]
        self._spare = self._spare[count:]
        return count

    def _take_record(self, memory: memoryview) -> int:
        if not self._size and self._num_in >= HEADER_BYTES:
            self._begin_record()
        if not self._size or self._num_in < self._size:
            return 0
        plain_size = self._size - OVERHEAD_BYTES
        if plain_size <= memory.nbytes:
            self._open_into(memory[:plain_size])
            return plain_size
        spare = memoryview(bytearray(plain_size))
        self._open_into(spare)
        self._spare = spare
        return self._take_spare(memory)

    def _begin_record(self) -> None:
        """The length comes first, so a peer's word allocates `MAX_SEALED_BYTES` at most."""
        size = HEADER_BYTES + int.from_bytes(self._buffer[:HEADER_BYTES], "big")
        if not OVERHEAD_BYTES < size <= MAX_SEALED_BYTES:
            raise RemoteProtocolError(f"a record of {size} bytes")
        if len(self._buffer) < size + HEADER_BYTES:
            begun = self._buffer[: self._num_in]
            self._buffer = memoryview(bytearray(size + HEADER_BYTES))
            self._buffer[: self._num_in] = begun
        self._size = size

    def _open_into(self, memory: memoryview) -> None:
        record, begun = self._buffer[: self._size], self._buffer[self._size : self._num_in]
        header, sealed = record[:HEADER_BYTES], record[HEADER_BYTES:]
        try:
            self._keys.cipher.decrypt_into(self._keys.nonce(), sealed, header, memory)
        except InvalidTag:
            raise RemoteProtocolError("a record that was not sealed so, or not in this turn") from None
        self._keys.advance()
        self._buffer[: len(begun)] = begun
        self._num_in, self._size = len(begun), 0


def _expand(secret: bytes, name: bytes, size: int) -> bytes:
    return HKDFExpand(SHA256(), size, b"farandole/record/1 " + name).derive(secret)
