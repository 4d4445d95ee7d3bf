"""Reading as the library reads: whole messages from pieces, with a bound on what comes before authentication."""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError

# Everything read from a connection until it is authenticated and multiplexed. Noise XX and the negotiation take about
# 600 bytes; one Noise message is at most 65,537.
MAX_HANDSHAKE_BYTES: Final = 64 * 1024
# One read: four Noise messages.
READ_BYTES: Final = 256 * 1024


class BoundedReads(ReadWriteCloser):
    """What reads from a peer, who is not authenticated at first."""

    transport = ""
    """What carries it, for errors."""

    def __init__(self) -> None:
        self._buffer = b""
        self._handshake_bytes_left: int | None = MAX_HANDSHAKE_BYTES

    @property
    def is_shaking_hands(self) -> bool:
        """Whether reads are still counted."""
        return self._handshake_bytes_left is not None

    def finish_handshake(self) -> None:
        """The peer is authenticated: reads are no longer counted."""
        self._handshake_bytes_left = None

    async def read(self, n: int | None = None) -> bytes:
        """Exactly n bytes, or what comes next; `ConnectionClosedError` if the connection ends before.

        The library asks for what is missing a hundred times, also at the end, and gives up where a message comes in
        more pieces than that: so it gets the whole, or an error.
        """
        if n is None:
            self._buffer = self._buffer or await self._receive()
        elif len(self._buffer) < n:
            pieces, size = [self._buffer], len(self._buffer)
            while size < n:
                pieces.append(await self._receive())
                size += len(pieces[-1])
            self._buffer = b"".join(pieces)
        data = self._buffer if n is None else self._buffer[:n]
        self._buffer = self._buffer[len(data) :]
        return data

    async def _receive(self) -> bytes:
        """At least a byte."""
        left = self._handshake_bytes_left
        if left is not None and left <= 0:
            raise ConnectionClosedError("handshake too long", transport=self.transport)
        data = await self._receive_some(READ_BYTES if left is None else min(left, READ_BYTES))
        if not data:
            raise ConnectionClosedError("connection closed", transport=self.transport)
        if left is not None:
            self._handshake_bytes_left = left - len(data)
        return data

    @abstractmethod
    async def _receive_some(self, max_bytes: int) -> bytes:
        """What comes next, b"" at the end; `ConnectionClosedError` where it breaks."""
