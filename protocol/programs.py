"""Messages between a node and programs of its owner, which use the node's mesh for protocols of their own.

A program connects to the node's socket once for each thing that it wants, and sends one request. The node sends one
`Answer`, and then:

    Open | Take      the bytes of a stream to a peer, both ways, until either end closes
    Listen           peers may open streams under the name while the connection is open; other connections wait for one
                     each with `Take`
    HoldNote*        the note is in the run state while the connection is open; another one, with an answer of its own,
                     replaces it
    Provide          this node is found as a provider of the file while the connection is open
    FindNotes        nothing: the answer has the notes
    FindProviders    nothing: the answer has the peers

Each message has its length before it (`farandole.protocol.wire.framing`).

On a stream two programs send each other messages: a length of four bytes, big-endian, then this number of bytes;
`END` instead of a length says that no more come. A stream that ends without it was broken off.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Annotated, Final

import msgspec

from .state.entries import MAX_NOTE_BYTES, NoteName, Sha256
from .wire.errors import RemoteProtocolError
from .wire.messagepack import MessageDecoder, TaggedMessage, encode

PROGRAMS_PROTOCOL: Final = "/farandole/programs/1/"
"""Prefix of the protocols of programs; the name that they have chosen follows."""
MAX_REQUEST_BYTES: Final = 1024
# The notes of 4,096 authors, each at most 512 bytes, with their peer ids.
MAX_ANSWER_BYTES: Final = 4 * 1024 * 1024
# A message that needs more is a file.
MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
LENGTH: Final = struct.Struct(">I")
END: Final = b"\xff\xff\xff\xff"
MAX_WAIT_SECONDS: Final = 600.0

_Seconds = Annotated[float, msgspec.Meta(gt=0.0, le=MAX_WAIT_SECONDS)]
_PeerId = Annotated[str, msgspec.Meta(max_length=64)]


class Open(TaggedMessage, frozen=True):
    """Open a stream to a peer, on which its program listens under this name."""

    peer: _PeerId
    name: NoteName
    seconds: _Seconds


class Listen(TaggedMessage, frozen=True):
    """Accept streams that peers open under this name."""

    name: NoteName


class Take(TaggedMessage, frozen=True):
    """Wait for the next stream that a peer opens under a name to which the program listens."""

    name: NoteName


class HoldNote(TaggedMessage, frozen=True):
    """Publish a note in the run state, or replace the one that this connection holds."""

    name: NoteName
    value: Annotated[bytes, msgspec.Meta(max_length=MAX_NOTE_BYTES)]


class FindNotes(TaggedMessage, frozen=True):
    """Read the notes of this name of all present members."""

    name: NoteName


class Provide(TaggedMessage, frozen=True):
    """Be found as a provider of a file."""

    file: Sha256


class FindProviders(TaggedMessage, frozen=True):
    """Find peers that say they provide a file."""

    file: Sha256
    seconds: _Seconds


class Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The node's answer to any request; fields of other requests are empty."""

    refusal: str = ""
    """For people; empty if the request is granted."""
    peer: str = ""
    """Peer id at the other end of a stream."""
    path: str = ""
    """How the stream travels, as `farandole peers` shows it."""
    notes: dict[str, bytes] = {}
    """Notes by peer id."""
    peers: list[str] = []
    """Peer ids of possible providers."""


Request = Open | Listen | Take | HoldNote | FindNotes | Provide | FindProviders

decode_request: Final = MessageDecoder[Request](Request, "a request of a program")
decode_answer: Final = MessageDecoder[Answer](Answer, "an answer to a program")


# Files that programs share (farandole.Mesh): a file's id is the hash of its index, which has a hash of each block.
#
# So whoever has the id, a text of 64 hexadecimal digits, can check every block that any peer gives.
#
#     fetches    INDEX_QUESTION           a message on a stream under the name `stream_name`
#     shares     the encoded index
#     fetches    a block's number*        four bytes, big-endian; at most `MAX_REQUESTED` unanswered
#     shares     the block*               in the same order

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
