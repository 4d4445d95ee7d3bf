"""Strands: several TCP connections as one bulk channel, where an end has more than one line.

    asker    Lines          answerer   Lines          over a libp2p stream, after a channel was negotiated
             (each negotiates the other connections: `farandole.protocol.exchange.bulk`, under `strand_session`)
    asker    Bound          answerer   Bound          the strands that both have; then the channel has these

The bytes of each direction are cut into pieces. Each piece goes over any strand that has room, behind a header with its
place: so a fast line takes more of them than a slow one. A header without a piece ends what is sent in one call, on
each strand. Strand 0 is the channel that there was before. docs/bulk-channel.md is the specification.
"""

from __future__ import annotations

import bisect
import struct
from typing import Annotated, Final

import msgspec
from blake3 import blake3

from ..wire.errors import RemoteProtocolError
from ..wire.messagepack import SESSION_BYTES, MessageDecoder

# Strands of a channel: each costs two threads while it moves data.
MAX_STRANDS: Final = 8
# A piece fills one record, less what its header's record has: on a slow line, the last pieces delay the end.
PIECE_BYTES: Final = 1 << 18
# Pieces that are remembered beyond the first missing one: a fast line may have sent all others while the buffers of a
# slow one drain. A sender whose contribution is still being encoded sends short pieces, too.
MAX_AHEAD: Final = 1_024
LEAST_MEAN_BYTES: Final = 16_384
HEADER: Final = struct.Struct(">QI")
# A session of 16 bytes and an integer; a list of at most `MAX_STRANDS` integers.
MAX_MESSAGE_BYTES: Final = 64


class Lines(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """The lines that its sender has besides the one of the channel."""

    session: Annotated[bytes, msgspec.Meta(min_length=SESSION_BYTES, max_length=SESSION_BYTES)]
    """The channel's name."""
    count: Annotated[int, msgspec.Meta(ge=0, lt=MAX_STRANDS)]


class Bound(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """The strands, besides strand 0, that its sender has; the answerer's has no others than the asker's."""

    strands: Annotated[list[Annotated[int, msgspec.Meta(ge=1, lt=MAX_STRANDS)]], msgspec.Meta(max_length=MAX_STRANDS)]


decode_strands = MessageDecoder[Lines | Bound](Lines | Bound, "a message about strands")


def strand_session(session: bytes, index: int) -> bytes:
    """Return the session under which strand ``index`` of a channel is negotiated."""
    return blake3(session + index.to_bytes(1, "big"), derive_key_context="farandole/strands/1").digest(SESSION_BYTES)


class Pieces:
    """The pieces of ``num_bytes`` that arrive from position ``start`` on, in any order. Sans-IO."""

    def __init__(self, start: int, num_bytes: int) -> None:
        self.position = start
        """Up to here, everything has arrived."""
        self.end = start + num_bytes
        self._max_ahead = MAX_AHEAD + num_bytes // LEAST_MEAN_BYTES
        self._ahead: list[tuple[int, int]] = []  # (start, stop) of pieces that are coming, or have come; ascending
        self._arrived: set[int] = set()  # the starts of those that have come

    def claim(self, offset: int, size: int) -> None:
        """Note the header of a piece that will come. Raises `RemoteProtocolError` if it has no place here."""
        place = bisect.bisect(self._ahead, (offset, 0))
        before = self._ahead[place - 1][1] if place else self.position
        after = self._ahead[place][0] if place < len(self._ahead) else self.end
        is_fit = 0 < size <= PIECE_BYTES and len(self._ahead) < self._max_ahead
        if not is_fit or offset < before or offset + size > after:
            raise RemoteProtocolError(f"a piece of {size} bytes at {offset}, between {before} and {after}")
        self._ahead.insert(place, (offset, offset + size))

    def arrived(self, offset: int) -> int:
        """Note that a claimed piece has come; return how much further everything has arrived now."""
        self._arrived.add(offset)
        before = self.position
        while self._ahead and self._ahead[0][0] in self._arrived and self._ahead[0][0] == self.position:
            start, self.position = self._ahead.pop(0)
            self._arrived.remove(start)
        return self.position - before
