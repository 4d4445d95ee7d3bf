"""A circuit as libp2p's upgraders read it: one end of a stream through a relay, in the place of a TCP socket."""

from __future__ import annotations

import trio
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError
from multiaddr import Multiaddr

from .streams import RelayedStream

# From a peer that is not authenticated yet; as `farandole.node.mends` has it for sockets.
MAX_HANDSHAKE_BYTES = 64 * 1024
# One read: four Noise messages.
READ_BYTES = 256 * 1024


class Circuit(ReadWriteCloser):
    """A stream to a relay, which copies it to a peer and back.

    The connection over it shapes what it moves, as every connection does; so the stream below does not, and goes
    behind what this node has to say to the relay itself.
    """

    def __init__(self, stream: RelayedStream, address: str) -> None:
        """``address``: the other end, a multiaddr with ``/p2p-circuit`` at its end."""
        stream.is_bulk = True
        self.addresses = [Multiaddr(address)]
        self._stream = stream
        self._buffer = b""
        self._handshake_bytes_left: int | None = MAX_HANDSHAKE_BYTES

    def finish_handshake(self) -> None:
        """The peer is authenticated: reads are no longer counted."""
        self._handshake_bytes_left = None

    async def read(self, n: int | None = None) -> bytes:
        """At most n bytes; b"" at the end; `ConnectionClosedError` when broken off."""
        if not self._buffer:
            left = self._handshake_bytes_left
            if left is not None and left <= 0:
                raise ConnectionClosedError("handshake too long", transport="relay")
            try:
                self._buffer = bytes(await self._stream.receive_some(min(left or READ_BYTES, READ_BYTES)))
            except trio.BrokenResourceError as error:
                raise ConnectionClosedError("circuit broken off", transport="relay") from error
            except trio.ClosedResourceError:
                return b""
            if left is not None:
                self._handshake_bytes_left = left - len(self._buffer)
        data = self._buffer if n is None else self._buffer[:n]
        self._buffer = self._buffer[len(data) :]
        return data

    async def write(self, data: bytes) -> None:
        """All of it; `ConnectionClosedError` when the circuit is gone."""
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError("circuit closed", transport="relay") from error

    async def close(self) -> None:
        """Close; what was written still goes out."""
        await self._stream.aclose()

    def abort(self) -> None:
        """Break off without a checkpoint."""
        self._stream.reset()

    def get_remote_address(self) -> tuple[str, int] | None:
        """None: who is behind a relay has no host and port here."""
        return None
