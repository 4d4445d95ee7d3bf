"""A file as blocks of one size with a hash each, for verifying a checkpoint and for moving it between nodes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from farandole.protocol.checkpoints.blocks import BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Content:
    """The size and the block hashes of a file."""

    size: int
    """Bytes."""
    hashes: bytes
    """SHA-256 of each block of `BLOCK_BYTES`, concatenated; the last block may be shorter."""


class BlockHasher:
    """A hasher of a file's blocks; bytes are added in order."""

    def __init__(self) -> None:
        self._size = 0
        self._hashes = bytearray()
        self._block = hashlib.sha256()

    def update(self, data: memoryview) -> None:
        """Add the next bytes, (n,) of one byte each."""
        while data:
            room = BLOCK_BYTES - self._size % BLOCK_BYTES
            piece, data = data[:room], data[room:]
            self._block.update(piece)
            self._size += len(piece)
            if len(piece) == room:
                self._hashes += self._block.digest()
                self._block = hashlib.sha256()

    def content(self) -> Content:
        """Return the content of all bytes added."""
        rest = self._block.digest() if self._size % BLOCK_BYTES else b""
        return Content(self._size, bytes(self._hashes) + rest)


def content_of(path: Path) -> Content:
    """Return the content of a file, which is read once; raises `OSError`."""
    hasher, buffer = BlockHasher(), memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while num_read := file.readinto(buffer):
            hasher.update(buffer[:num_read])
    return hasher.content()
