"""One stream of a `farandole.node.mesh.yamux` connection: what was received and not read, and windows both ways."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio
from libp2p.abc import IMuxedStream
from libp2p.stream_muxer.exceptions import MuxedStreamClosed, MuxedStreamEOF, MuxedStreamReset

from .yamux_frames import DATA, FIN, PIECE_BYTES, RST, WINDOW_UPDATE, YamuxError

if TYPE_CHECKING:
    from types import TracebackType

    from .yamux import YamuxConn

# The receive window that the specification starts with, and how far a stream's grows while its reader keeps up:
# 8 MiB is 1 Gbit/s at 64 ms. What nobody reads never makes a window grow.
INITIAL_WINDOW = 256 * 1024
MAX_WINDOW = 8 * 1024 * 1024
# A window doubles if it was used up within so many round trips (go-yamux).
GROW_WITHIN_ROUND_TRIPS = 4
ASSUMED_ROUND_TRIP = 0.1
# A window update says that half a window was read; less says nothing, and so does what goes beyond any window.
MIN_CREDIT = 4 * 1024
MAX_CREDIT = 256 * 1024 * 1024


class YamuxStream(IMuxedStream):
    """One stream. Reads and writes may be cancelled anywhere; what was not taken stays."""

    def __init__(self, stream_id: int, conn: YamuxConn) -> None:
        self.stream_id = stream_id
        self.muxed_conn = conn
        self.is_reset = False
        self.is_bulk = False  # the user shapes what moves; it is sent behind everything else
        self.num_left = math.inf  # bytes that the other end may send in all
        self.max_window = MAX_WINDOW  # the other end may have no more under way, however fast it is read
        self._conn = conn
        self._unread = bytearray()
        self._ended = False  # by the other end, cleanly
        self._finished = False  # by this end
        self._send_window = INITIAL_WINDOW
        self._receive_window = INITIAL_WINDOW  # what the other end may still send
        self._window = INITIAL_WINDOW  # what it may have under way at most
        self._consumed = 0  # read here and not yet given back as credit
        self._credited_at = -math.inf
        self._changed = trio.Event()

    # For readers and writers

    async def read(self, n: int | None = None) -> bytes:
        """At most n bytes; `MuxedStreamEOF` at a clean end, `MuxedStreamReset` if there was none."""
        await trio.lowlevel.checkpoint()
        while not self._unread:
            if self._ended:
                raise MuxedStreamEOF("the other end has finished")
            if self.is_reset:
                raise MuxedStreamReset("stream reset or connection lost")
            await self._changed.wait()
        if n is None or n < 0 or n >= len(self._unread):
            data = bytes(self._unread)
            self._unread.clear()
        else:
            data = bytes(self._unread[:n])
            del self._unread[:n]
        self._conn.count_unread(-len(data))
        self._give_credit(len(data))
        return data

    async def write(self, data: bytes | memoryview) -> None:
        """Queue all of it, waiting for credit and for room; the frames of one stream keep their order."""
        await trio.lowlevel.checkpoint()
        view = memoryview(data)
        while view:
            if self.is_reset:
                raise MuxedStreamReset("stream reset or connection lost")
            if self._finished:
                raise MuxedStreamClosed("this end has finished")
            if self._send_window <= 0:
                await self._changed.wait()
            elif not (self._conn.is_at_rest if self.is_bulk else self._conn.has_room):
                await self._conn.wait_for_room()
            else:
                piece = view[: min(PIECE_BYTES, self._send_window)]
                view = view[len(piece) :]
                self._send_window -= len(piece)
                self._conn.put(DATA, 0, self.stream_id, len(piece), piece, is_bulk=self.is_bulk)

    async def close(self) -> None:
        """Finish this end; the other may go on."""
        self.finish()
        await trio.lowlevel.checkpoint()

    async def close_write(self) -> None:
        """The same, by the name that the library looks for."""
        await self.close()

    async def reset(self) -> None:
        """Break both directions off."""
        self.break_off()
        await trio.lowlevel.checkpoint()

    def finish(self) -> None:
        """Say that nothing more comes from this end, after what was written."""
        if not self._finished and not self.is_reset:
            self._finished = True
            self._conn.put(WINDOW_UPDATE, FIN, self.stream_id, 0)
            self._forget_if_over()

    def abandon(self) -> None:
        """`finish`, and take nothing more from the other end: it is told so when it sends more."""
        self.finish()
        self._drop_unread()
        self._conn.forget(self.stream_id)

    def break_off(self) -> None:
        """`reset` without a checkpoint."""
        if not self.is_reset and not (self._finished and self._ended):
            self._conn.put(WINDOW_UPDATE, RST, self.stream_id, 0)
        self.mark_lost()
        self._drop_unread()
        self._conn.forget(self.stream_id)

    # For the connection

    def take(self, data: memoryview) -> None:
        """Data came in."""
        self._receive_window -= len(data)
        if self._receive_window < 0:
            raise YamuxError("more than the window")
        self.num_left -= len(data)
        if self.num_left < 0:
            return self.break_off()
        self._unread += data
        self._conn.count_unread(len(data))
        self._wake()

    def add_credit(self, amount: int) -> None:
        """The other end has read something."""
        self._send_window += amount
        if amount < MIN_CREDIT or self._send_window > MAX_CREDIT:
            self._send_window = min(self._send_window, MAX_CREDIT)
            self._conn.bear(1)
        self._wake()

    def mark_ended(self) -> None:
        """The other end has finished."""
        self._ended = True
        self._wake()
        self._forget_if_over()

    def mark_lost(self) -> None:
        """The connection is gone. What was received can still be read."""
        self.is_reset = True
        self._wake()

    def mark_reset(self) -> None:
        """The other end broke the stream off, and with it what was not read, unless it had finished before."""
        if not self._ended:
            self._drop_unread()
        self.mark_lost()
        self._conn.forget(self.stream_id)

    def limit(self, max_bytes: int) -> None:
        """Break the stream off when the other end has sent more than this; what it has sent so far counts."""
        self.num_left = max_bytes - len(self._unread)
        if self.num_left < 0:
            self.break_off()

    @property
    def num_unread(self) -> int:
        """Bytes received and not read."""
        return len(self._unread)

    def _give_credit(self, amount: int) -> None:
        self._consumed += amount
        if self._ended or self.is_reset or self._consumed < self._window // 2:
            return
        now = trio.current_time()
        increment = self._consumed
        soon = GROW_WITHIN_ROUND_TRIPS * (self._conn.round_trip or ASSUMED_ROUND_TRIP)
        if now - self._credited_at < soon and self._window < self.max_window:
            increment += self._window
            self._window *= 2
        self._credited_at = now
        self._consumed = 0
        self._receive_window += increment
        self._conn.put(WINDOW_UPDATE, 0, self.stream_id, increment)

    def _drop_unread(self) -> None:
        self._conn.count_unread(-len(self._unread))
        self._unread.clear()

    def _forget_if_over(self) -> None:
        if self._finished and self._ended:
            self._conn.forget(self.stream_id)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # The rest of the library's interface

    def set_deadline(self, ttl: int) -> None:
        """Deadlines are cancel scopes here."""
        raise NotImplementedError

    def get_remote_address(self) -> tuple[str, int] | None:
        """The connection's."""
        return self._conn.get_remote_address()

    async def __aenter__(self) -> YamuxStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
