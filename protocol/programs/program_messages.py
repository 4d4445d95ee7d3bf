"""Messages between a node and programs of its owner, which use the node's mesh for protocols of their own.

A program connects to the node's socket once for each thing that it wants, and sends one request:

    Open | Take      StreamReady, then the bytes of a stream to a peer, both ways, until either end closes
    Listen           RequestGranted, then a Ringing for each stream that a peer opens; another connection takes it with
                     `Take`
    HoldNote*        RequestGranted for each: the note is in the run state while the connection is open
    Provide          RequestGranted: this node is found as a provider of the file while the connection is open
    FindNotes        NotesFound
    FindProviders    ProvidersFound

`Refused` may come instead of any answer. Each message has its length before it (`farandole.protocol.wire.framing`).

On a stream two programs send each other messages: a length of four bytes, big-endian, then this number of bytes;
`END` instead of a length says that no more come. A stream that ends without it was broken off.
"""

from __future__ import annotations

import struct
from typing import Annotated, Final

import msgspec

from ..state.entries import MAX_NOTE_BYTES, NoteName, Sha256
from ..wire.framing import frame
from ..wire.messagepack import MessageDecoder, encode

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


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    pass


class Open(_Message, frozen=True):
    """Open a stream to a peer, on which its program listens under this name."""

    peer: _PeerId
    name: NoteName
    seconds: _Seconds


class Listen(_Message, frozen=True):
    """Accept streams that peers open under this name."""

    name: NoteName


class Take(_Message, frozen=True):
    """Take over a stream that a peer has opened (`Ringing`)."""

    ticket: int


class HoldNote(_Message, frozen=True):
    """Publish a note in the run state, or replace the one that this connection holds."""

    name: NoteName
    value: Annotated[bytes, msgspec.Meta(max_length=MAX_NOTE_BYTES)]


class FindNotes(_Message, frozen=True):
    """Read the notes of this name of all present members."""

    name: NoteName


class Provide(_Message, frozen=True):
    """Be found as a provider of a file."""

    file: Sha256


class FindProviders(_Message, frozen=True):
    """Find peers that say they provide a file."""

    file: Sha256
    seconds: _Seconds


class StreamReady(_Message, frozen=True):
    """The stream is open; its bytes follow."""

    peer: str
    path: str
    """How it travels, as `farandole peers` shows it."""


class Refused(_Message, frozen=True):
    """The request failed."""

    reason: str


class RequestGranted(_Message, frozen=True):
    """The request holds."""


class Ringing(_Message, frozen=True):
    """A peer has opened a stream."""

    ticket: int
    peer: str


class NotesFound(_Message, frozen=True):
    """The notes by peer id."""

    notes: dict[str, bytes]


class ProvidersFound(_Message, frozen=True):
    """Peer ids of possible providers."""

    peers: list[str]


Request = Open | Listen | Take | HoldNote | FindNotes | Provide | FindProviders
Answer = StreamReady | Refused | RequestGranted | Ringing | NotesFound | ProvidersFound

decode_request: Final = MessageDecoder[Request](Request, "a request of a program")
decode_answer: Final = MessageDecoder[Answer](Answer, "an answer to a program")


def framed_request(request: Request) -> bytes:
    """Encode a request with its length."""
    return frame(encode(request), MAX_REQUEST_BYTES)


def framed_answer(answer: Answer) -> bytes:
    """Encode an answer with its length."""
    return frame(encode(answer), MAX_ANSWER_BYTES)
