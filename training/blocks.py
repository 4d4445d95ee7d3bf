"""A file as blocks of one size with a hash each: what a checkpoint is proved by, and how it moves between nodes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from farandole.protocol.blocks import BLOCK_BYTES, HASH_BYTES


@dataclass(frozen=True, slots=True)
class Content:
    """What is in a file."""

    size: int
    """Bytes."""
    hashes: bytes
    """SHA-256 of each `BLOCK_BYTES` of it, one after the other; the last block may be shorter."""


class BlockHasher:
    """Hashes a file's bytes in their order."""

    def __init__(self) -> None:
        self._size = 0
        self._hashes = bytearray()
        self._block = hashlib.sha256()

    def update(self, data: memoryview) -> None:
        """The next bytes, (n,) of one byte each."""
        while data:
            room = BLOCK_BYTES - self._size % BLOCK_BYTES
            piece, data = data[:room], data[room:]
            self._block.update(piece)
            self._size += len(piece)
            if len(piece) == room:
                self._hashes += self._block.digest()
                self._block = hashlib.sha256()

    def content(self) -> Content:
        """Of all bytes so far."""
        rest = self._block.digest() if self._size % BLOCK_BYTES else b""
        return Content(self._size, bytes(self._hashes) + rest)


def content_of(path: Path) -> Content:
    """Of a file, which is read once; raises `OSError`."""
    hasher, buffer = BlockHasher(), memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while num_read := file.readinto(buffer):
            hasher.update(buffer[:num_read])
    return hasher.content()


def first_difference(content: Content, hashes: bytes) -> int | None:
    """Index of the first block that is not as ``hashes`` has it, None if all are."""
    if content.hashes == hashes:
        return None
    starts = range(0, max(len(content.hashes), len(hashes)), HASH_BYTES)
    return next(
        start // HASH_BYTES
        for start in starts
        if content.hashes[start : start + HASH_BYTES] != hashes[start : start + HASH_BYTES]
    )
