"""One stream of libp2p's, with trio's errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import trio
from libp2p.connection_types import ConnectionType
from libp2p.stream_muxer.exceptions import MuxedStreamClosed, MuxedStreamEOF, MuxedStreamError

if TYPE_CHECKING:
    from libp2p.network.stream.net_stream import NetStream

    from .yamux import MuxedStream


class Stream(trio.abc.HalfCloseableStream):
    """One libp2p stream. Its errors are trio's: `BrokenResourceError` when the peer or its connection is gone.

    Every wait may be cancelled and taken up again without losing a byte, but a `send_all` that was cancelled has sent
    an unknown part.
    """

    def __init__(self, stream: NetStream, peer: bytes, protocol: str) -> None:
        self.peer = peer
        self.protocol = protocol
        self._net_stream = stream
        self._stream = cast("MuxedStream", stream.muxed_stream)
        self._is_closed = False

    @property
    def is_bulk(self) -> bool:
        """Whether whoever uses the stream keeps to the caps (`farandole.node.base.bandwidth`) for both ways of it.

        Its data then goes behind all else. On other streams nothing waits for the caps, and everything counts.
        """
        return self._stream.state.is_bulk

    @is_bulk.setter
    def is_bulk(self, value: bool) -> None:
        self._stream.state.is_bulk = value

    @property
    def is_relayed(self) -> bool:
        """Whether a relay carries the connection."""
        return self._stream.muxed_conn.get_connection_type() is ConnectionType.RELAYED

    @property
    def remote_address(self) -> tuple[str, int] | None:
        """Host and port at the other end of the connection; None where it is relayed."""
        return self._stream.get_remote_address()

    def limit_window(self, max_bytes: int) -> None:
        """Let the peer have no more than this under way to us, if that is more than every stream begins with."""
        self._stream.state.max_window = max_bytes

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of it, or raise `trio.BrokenResourceError`. Waits for as long as the peer takes nothing."""
        self._check_open()
        try:
            await self._stream.write(memoryview(data).cast("B"))
        except MuxedStreamClosed as error:
            raise trio.ClosedResourceError from error
        except MuxedStreamError as error:
            raise trio.BrokenResourceError(f"{self.protocol}: {error}") from error

    async def wait_send_all_might_not_block(self) -> None:
        """Nothing is known beforehand."""
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """At least one byte, or b"" when the peer has ended its side; `trio.BrokenResourceError` when it is gone."""
        self._check_open()
        try:
            return await self._stream.read(max_bytes)
        except MuxedStreamEOF:
            return b""
        except MuxedStreamError as error:
            raise trio.BrokenResourceError(f"{self.protocol}: {error}") from error

    async def send_eof(self) -> None:
        """No more from this side; the peer's side stays open."""
        self._check_open()
        await self._stream.close()

    async def aclose(self) -> None:
        """End both sides. What was sent still arrives, and what comes is refused."""
        if not self._is_closed:
            self._is_closed = True
            self._stream.abandon()
            self._remove()
        await trio.lowlevel.checkpoint()

    def reset(self) -> None:
        """Break the stream off: the peer gets an error, not an end."""
        if not self._is_closed:
            self._is_closed = True
            self._stream.break_off()
            self._remove()

    def _remove(self) -> None:
        if self._net_stream.swarm_conn is not None:
            self._net_stream.swarm_conn.remove_stream(self._net_stream)

    def _check_open(self) -> None:
        if self._is_closed:
            raise trio.ClosedResourceError
