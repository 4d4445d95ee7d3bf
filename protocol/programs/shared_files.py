"""Files that programs share (farandole.Mesh): a file's id is the hash of its index, which has a hash of each block.

So whoever has the id, a text of 64 hexadecimal digits, can check every block that any peer gives.

    fetches    INDEX_QUESTION           a message on a stream under the name `stream_name`
    shares     the encoded index
    fetches    a block's number*        four bytes, big-endian; at most `MAX_REQUESTED` unanswered
    shares     the block*               in the same order
"""

from __future__ import annotations

import hashlib
import struct
from typing import Annotated, Final

import msgspec

from ..state.entries import Sha256
from ..wire.errors import RemoteProtocolError
from ..wire.messagepack import MessageDecoder, encode

BLOCK_BYTES: Final = 1024 * 1024
# A file of 64 GiB, whose index has 2 MiB.
MAX_BLOCKS: Final = 65_536
# Requests on their way keep a line of 100 Mbit/s and 600 ms busy.
MAX_REQUESTED: Final = 8
INDEX_QUESTION: Final = b"index"
BLOCK_NUMBER: Final = struct.Struct(">I")


class FileIndex(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A file's size in bytes, and the SHA-256 of each block of `BLOCK_BYTES`; the last one may be shorter."""

    size: Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCKS * BLOCK_BYTES)]
    hashes: Annotated[tuple[Sha256, ...], msgspec.Meta(max_length=MAX_BLOCKS)]

    @property
    def id(self) -> str:
        """The file's id: 64 hexadecimal digits."""
        return hashlib.sha256(encode(self)).hexdigest()

    def block_bytes(self, number: int) -> int:
        """Return the size of a block."""
        return min(BLOCK_BYTES, self.size - number * BLOCK_BYTES)

    def is_block(self, number: int, data: bytes) -> bool:
        """Return whether this is the block of this number."""
        return hashlib.sha256(data).digest() == self.hashes[number]


_decode: Final = MessageDecoder[FileIndex](FileIndex, "the index of a file")


def decode_index(raw: bytes, file_id: str) -> FileIndex:
    """Return the index; raise `RemoteProtocolError` if it is not the one with this id, or contradicts itself."""
    if hashlib.sha256(raw).hexdigest() != file_id:
        raise RemoteProtocolError("the index is another file's")
    index = _decode(raw)
    if len(index.hashes) != -(-index.size // BLOCK_BYTES):
        raise RemoteProtocolError(f"{len(index.hashes)} blocks for a file of {index.size} bytes")
    return index


def stream_name(file_id: str) -> str:
    """Return the name under which a program that shares the file listens."""
    return f"file/{file_id[:32]}"
