"""The record layer of bulk channels: bytes sealed by AES-256-GCM, record after record, under a key for one direction.

    record      header (4 bytes, big-endian)   ciphertext and tag (as many bytes as the header's low 31 bits say)

The header is the record's associated data, and the record's number on the channel is the nonce. So a record opens only
whole, once and in its turn. A record that is modified, dropped, repeated, reordered, or from another channel or the
other direction ends the channel, and nothing of it counts. The header's top bit marks the first record under the next
key: the sender sets it when a key has been used enough. A record without plaintext is the last; a connection that ends
without one was cut off. docs/bulk-channel.md specifies the channel; tests/protocol/exchange/vectors/bulk_channel.json
has known answers.

In a private run a keystream of the run's key hides the header too, which then shows no lengths; all else of a record is
random to whoever lacks its key.

AES with 256 bits, not 128: it costs a tenth of the cipher's rate, which is a fiftieth of the channel's. Nonces may then
count from 0 in each channel: with keys of 128 bits, an attacker who records 2^k channels with the same beginning would
find one of their keys in 2^(128-k) steps (RFC 8446 has a secret first nonce against that).
"""

from __future__ import annotations

from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import CipherContext
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from .errors import LocalProtocolError, RemoteProtocolError

SECRET_BYTES: Final = 32
KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
HEADER_BYTES: Final = 4
TAG_BYTES: Final = 16
# Plaintext of a record: large enough that the overhead per record is negligible, small enough that it is still in the
# core's cache when it is decrypted and hashed, and that a lost channel loses little.
RECORD_BYTES: Final = 1 << 18
# Overhead of a record on the wire in addition to its plaintext, and the longest record on the wire.
OVERHEAD_BYTES: Final = HEADER_BYTES + TAG_BYTES
MAX_SEALED_BYTES: Final = RECORD_BYTES + OVERHEAD_BYTES
# Bytes on the wire under one key: 2^28 blocks of AES at most. RFC 8446 (5.5) allows a key 2^34.5 blocks, for an
# attacker's advantage of 2^-57, RFC 9001 (6.6, B.1) 2^35; NIST SP 800-38D (5.2.1.1, 8.2.1, 8.3) allows 2^36 bytes a
# record, and any number of counted nonces. A forged record is the last of its channel. The limit is lower than
# necessary, so that a busy channel does reach its next key; deriving one costs 20 microseconds.
BYTES_PER_KEY: Final = 1 << 32
# A key that is stolen from memory opens all records since its first one. SSH has an hour (RFC 4253, 9).
SECONDS_PER_KEY: Final = 600.0
# In a header: this record is the first under the next key.
NEXT_KEY: Final = 1 << 31


class _Keys:
    """A chain of keys; a key does not reveal the earlier ones (as RFC 8446, 7.2).

    Records are numbered across all keys, so a record that is removed before a new key is missed like any other.
    """

    def __init__(self, secret: bytes, max_bytes: int) -> None:
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a secret has {SECRET_BYTES} bytes, this has {len(secret)}")
        self._secret = secret
        self._max_bytes = max_bytes
        self._number = 0
        self._begin_key()

    def has_room(self, size: int) -> bool:
        """Return whether this key may seal a record of ``size`` bytes on the wire; its first record always may."""
        return not self._num_bytes or self._num_bytes + size <= self._max_bytes

    def use(self, size: int) -> bytes:
        """Return the nonce of the next record, which has ``size`` bytes on the wire."""
        nonce = self._number.to_bytes(NONCE_BYTES, "big")
        self._number += 1
        self._num_bytes += size
        return nonce

    def next_key(self) -> None:
        """Replace this key by the next one."""
        self._secret = _expand(self._secret, b"next secret", SECRET_BYTES)
        self._begin_key()

    def _begin_key(self) -> None:
        self.cipher = AESGCM(_expand(self._secret, b"key", KEY_BYTES))
        self._num_bytes = 0


class Sealer:
    """Makes records. ``secret``: 32 bytes, shared with the `Opener` and used for nothing else.

    ``now``, here and below: any clock that never goes back, in seconds. ``hiding``: what hides the headers, if any.
    ``max_bytes``, ``max_seconds``: how much a key seals, and for how long.
    """

    def __init__(
        self,
        secret: bytes,
        now: float,
        hiding: CipherContext | None = None,
        *,
        max_bytes: int = BYTES_PER_KEY,
        max_seconds: float = SECONDS_PER_KEY,
    ) -> None:
        self._hiding = hiding
        self._keys = _Keys(secret, max_bytes)
        self._max_seconds = max_seconds
        self._key_until = now + max_seconds
        self._buffer = memoryview(bytearray())
        self._has_finished = False

    def seal(self, data: memoryview, now: float) -> memoryview:
        """Seal 1 to `RECORD_BYTES` bytes as a record, `OVERHEAD_BYTES` longer; it is valid until the next call."""
        if not 0 < data.nbytes <= RECORD_BYTES:
            raise LocalProtocolError(f"a record of {data.nbytes} bytes")
        return self._seal(data, now)

    def finish(self, now: float) -> memoryview:
        """Return the final record, after which there is none."""
        record = self._seal(memoryview(b""), now)
        self._has_finished = True
        return record

    def _seal(self, data: memoryview, now: float) -> memoryview:
        if self._has_finished:
            raise LocalProtocolError("a record after the final one")
        size = data.nbytes + OVERHEAD_BYTES
        word = size - HEADER_BYTES
        if now >= self._key_until or not self._keys.has_room(size):
            self._keys.next_key()
            self._key_until = now + self._max_seconds
            word |= NEXT_KEY
        if len(self._buffer) < size:
            self._buffer = memoryview(bytearray(size))
        record = self._buffer[:size]
        header = word.to_bytes(HEADER_BYTES, "big")
        record[:HEADER_BYTES] = header if self._hiding is None else self._hiding.update(header)
        self._keys.cipher.encrypt_into(self._keys.use(size), data, header, record[HEADER_BYTES:])
        return record


class Opener:
    """Reads records: put bytes from the wire into `wanted`, count them by `received`, and `take` verified plaintext.

    `wanted` covers no more than the current record and the next one's header. After an error, `take` repeats the error.
    ``hiding``: the other end's cipher for headers, from the same position. ``max_bytes``: what a key may have sealed.
    """

    def __init__(self, secret: bytes, hiding: CipherContext | None = None, *, max_bytes: int = BYTES_PER_KEY) -> None:
        self._hiding = hiding
        self.has_ended = False
        """Whether the final record has come."""
        self._keys = _Keys(secret, max_bytes)
        self._buffer = memoryview(bytearray(2 * HEADER_BYTES))
        self._num_in = 0  # bytes from the wire in the buffer: a record or its beginning, and at most a header more
        self._size = 0  # of the record on the wire, once its header is in
        self._spare = memoryview(b"")  # plaintext that the last call had no room for
        self._failure: RemoteProtocolError | None = None

    @property
    def is_clean(self) -> bool:
        """Return whether everything received has been taken, and more may come."""
        return not (self._num_in or self._spare or self._failure or self.has_ended)

    @property
    def wanted(self) -> memoryview:
        """Return the memory for the next bytes from the wire; never empty while `take` returns 0.

        Nothing may come once the opener `has_ended`.
        """
        return self._buffer[self._num_in : (self._size or 0) + HEADER_BYTES]

    def received(self, count: int) -> None:
        """Count ``count`` bytes that were put into `wanted`."""
        self._num_in += count

    def take(self, memory: memoryview) -> int:
        """Write verified plaintext to the front of the memory and return its number of bytes.

        Returns 0 if more bytes from the wire are needed first, or if that was the final record. The memory behind the
        plaintext is undefined. Raises `RemoteProtocolError` for a record that is not authentic.
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
        if self.has_ended and self._num_in:
            raise RemoteProtocolError("bytes after the final record")
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
        """Check the header's length before allocating, so that a peer makes us allocate `MAX_SEALED_BYTES` at most."""
        if self._hiding is not None:
            self._buffer[:HEADER_BYTES] = self._hiding.update(self._buffer[:HEADER_BYTES])
        word = int.from_bytes(self._buffer[:HEADER_BYTES], "big")
        size = HEADER_BYTES + (word & ~NEXT_KEY)
        if not OVERHEAD_BYTES <= size <= MAX_SEALED_BYTES:
            raise RemoteProtocolError(f"a record of {size} bytes")
        if word & NEXT_KEY:
            self._keys.next_key()
        elif not self._keys.has_room(size):
            raise RemoteProtocolError("a record under a key that has sealed enough")
        if len(self._buffer) < size + HEADER_BYTES:
            begun = self._buffer[: self._num_in]
            self._buffer = memoryview(bytearray(size + HEADER_BYTES))
            self._buffer[: self._num_in] = begun
        self._size = size

    def _open_into(self, memory: memoryview) -> None:
        record, begun = self._buffer[: self._size], self._buffer[self._size : self._num_in]
        header, sealed = record[:HEADER_BYTES], record[HEADER_BYTES:]
        try:
            self._keys.cipher.decrypt_into(self._keys.use(len(record)), sealed, header, memory)
        except InvalidTag:
            raise RemoteProtocolError("a record that was not sealed so, or not in this turn") from None
        self.has_ended = self._size == OVERHEAD_BYTES
        self._buffer[: len(begun)] = begun
        self._num_in, self._size = len(begun), 0


def _expand(secret: bytes, name: bytes, size: int) -> bytes:
    return HKDFExpand(SHA256(), size, b"farandole/record/2 " + name).derive(secret)
