"""Many streams on one connection: yamux (github.com/hashicorp/yamux, spec.md), as libp2p uses it.

Instead of py-libp2p 0.8.1's own, which loses what it has received when a connection closes, corrupts the connection if
a write is cancelled, loses data when a read is, resets a stream whose receiver rests for 5 s, polls for credit, shows
a killed peer as a clean end, and halves a full frame into two Noise messages.

One task reads the connection and one writes it; streams only touch buffers, so cancelling a stream's wait can never
leave half a frame on the wire or lose a byte. Everything that a frame causes happens between two checkpoints: no locks.

What moves is charged to the node's caps (shaping.py) here, except the payload of bulk streams, which wait for the caps
above, and for an empty queue here: no control frame waits behind more bulk than the one message that is being written.
"""

from __future__ import annotations

import logging
import math
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import trio
from libp2p.abc import IMuxedConn, IMuxedStream, ISecureConn
from libp2p.connection_types import ConnectionType
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamClosed, MuxedStreamEOF, MuxedStreamReset

from farandole.protocol.token_bucket import TokenBucket

from ..shaping import Shaping

if TYPE_CHECKING:
    from types import TracebackType

    from multiaddr import Multiaddr

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("!BBHII")  # version, type, flags, stream, length
_DATA, _WINDOW_UPDATE, _PING, _GO_AWAY = range(4)
_SYN, _ACK, _FIN, _RST = 1, 2, 4, 8

# Header and data fill one Noise message: 65,535 - 16 of tag.
MAX_MESSAGE_BYTES = 65_519
PIECE_BYTES = MAX_MESSAGE_BYTES - _HEADER.size
# The receive window that the specification starts with, and how far a stream's grows while its reader keeps up:
# 8 MiB is 1 Gbit/s at 64 ms. What nobody reads never makes a window grow.
INITIAL_WINDOW = 256 * 1024
MAX_WINDOW = 8 * 1024 * 1024
# A window doubles if it was used up within so many round trips (go-yamux).
GROW_WITHIN_ROUND_TRIPS = 4
ASSUMED_ROUND_TRIP = 0.1
# Streams that the other end may have open here at once: the backlog that the specification recommends. And those of
# them that nobody has taken up yet: nothing here opens more at once.
MAX_INBOUND_STREAMS = 256
MAX_WAITING_STREAMS = 64
# Received and not yet read, over all streams of a connection; the stream with the most gives way. And of all strangers
# together: one stream's whole window.
MAX_UNREAD_BYTES = 16 * 1024 * 1024
MAX_STRANGERS_UNREAD_BYTES = MAX_WINDOW
# What brings nothing costs the other end: a frame 1, and 1 more for every 4 KiB of it; a ping 8; a stream that is
# refused 64. It may owe so much at once, which is 20 ms of work, and pays off so much a second; then it is cut off.
# Honest peers cause some: what is under way to a stream that ends here is 8 MiB at most, in full frames 2,176.
USELESS_BURST, USELESS_PER_SECOND = 4_096.0, 64.0
USELESS_BYTES, PING_COST, REFUSAL_COST = 4 * 1024, 8, 64
# A window update says that half a window was read; less says nothing, and so does what goes beyond any window.
MIN_CREDIT = 4 * 1024
MAX_CREDIT = 256 * 1024 * 1024
# Data waits for room at the writer, so that control frames never queue behind much; control frames do not wait, and
# a peer that makes us owe it this much of them without reading is cut off.
MAX_QUEUED_DATA = 128 * 1024
MAX_QUEUED_BYTES = 1024 * 1024


class YamuxError(Exception):
    """The other end broke the protocol, or takes nothing from us."""


class Commons:
    """What the connections of one node share: the memory for what strangers send and nobody has read.

    A stranger is a peer for whom ``is_needed`` says no. Keys are free, so a bound for each of them is none for all.
    """

    def __init__(self) -> None:
        self.is_needed: Callable[[ID], bool] = lambda peer_id: False
        self.conns: set[YamuxConn] = set()
        self.num_unread = 0

    def limit(self) -> None:
        """If strangers have sent too much, the one with the most loses the stream with the most."""
        if self.num_unread <= MAX_STRANGERS_UNREAD_BYTES:
            return
        strangers = [conn for conn in self.conns if not self.is_needed(conn.peer_id)]
        if sum(conn.num_unread for conn in strangers) > MAX_STRANGERS_UNREAD_BYTES:
            max(strangers, key=lambda conn: conn.num_unread).drop_fullest()


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
                self._conn.put(_DATA, 0, self.stream_id, len(piece), piece, is_bulk=self.is_bulk)

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
            self._conn.put(_WINDOW_UPDATE, _FIN, self.stream_id, 0)
            self._forget_if_over()

    def abandon(self) -> None:
        """`finish`, and take nothing more from the other end: it is told so when it sends more."""
        self.finish()
        self._drop_unread()
        self._conn.forget(self.stream_id)

    def break_off(self) -> None:
        """`reset` without a checkpoint."""
        if not self.is_reset and not (self._finished and self._ended):
            self._conn.put(_WINDOW_UPDATE, _RST, self.stream_id, 0)
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
        self._conn.put(_WINDOW_UPDATE, 0, self.stream_id, increment)

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


class YamuxConn(IMuxedConn):
    """One connection and its streams."""

    def __init__(
        self,
        secured_conn: ISecureConn,
        peer_id: ID,
        shaping: Shaping | None = None,
        commons: Commons | None = None,
    ) -> None:
        self.secured_conn = secured_conn
        self.peer_id = peer_id
        self.event_started = trio.Event()
        self.event_closed = trio.Event()
        self.on_close: Callable[[], Awaitable[None]] | None = None
        self.num_received = 0
        self.num_unread = 0
        self.round_trip: float | None = None
        """Seconds, as last measured; None: not yet."""
        self._shaping = shaping or Shaping()
        self._commons = commons or Commons()
        self._useless = TokenBucket(USELESS_BURST, USELESS_PER_SECOND, trio.current_time())
        self._num_inbound = 0
        self._streams: dict[int, YamuxStream] = {}
        self._next_stream_id = 1 if secured_conn.is_initiator else 2
        self._scope = trio.CancelScope()
        self._accepting, self._accepted = trio.open_memory_channel[YamuxStream](MAX_WAITING_STREAMS)
        # Writing
        self._queue: deque[bytes] = deque()
        self._num_queued = 0
        self._work = trio.Event()
        self._room = trio.Event()
        # Reading: the rest of an incomplete header, or the stream and the rest of an incomplete data frame
        self._header = bytearray()
        self._body: tuple[YamuxStream | None, int, int, int] | None = None  # stream, its id, bytes left, flags
        self._ping_number = 0
        self._pongs: dict[int, trio.Event] = {}

    async def start(self) -> None:
        """Run until either end closes or the connection fails. Raises nothing."""
        self._commons.conns.add(self)
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._run, self._write_frames)
                    nursery.start_soon(self._run, self._read_frames)
                    self.event_started.set()
        finally:
            self.event_started.set()
            self._accepting.close()
            for stream in self._streams.values():
                stream.mark_lost()
            self._streams.clear()
            self.event_closed.set()
            self._room.set()
            self._commons.num_unread -= self.num_unread
            self._commons.conns.discard(self)

    async def _run(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:  # whatever a broken connection or its encryption raises ends it, and nothing else
            logger.debug("the connection to %s ends: %r", self.peer_id, error)
        self._scope.cancel()

    async def close(self) -> None:
        """Say goodbye and end; waits until what was queued is written, so give it a deadline."""
        if not self.event_closed.is_set() and self.event_started.is_set():
            self.put(_GO_AWAY, 0, 0, 0)
            while self._num_queued and not self.event_closed.is_set():
                await self.wait_for_room()
        self.abort()

    def abort(self) -> None:
        """End at once, whatever the other end takes or says."""
        self._scope.cancel()
        self.event_closed.set()

    async def ping(self) -> float:
        """Returns the round trip in seconds when the other end has answered."""
        started = trio.current_time()
        self._ping_number = number = (self._ping_number + 1) % 2**32
        self._pongs[number] = pong = trio.Event()
        self.put(_PING, _SYN, 0, number)
        try:
            await pong.wait()
        finally:
            del self._pongs[number]
        self.round_trip = trio.current_time() - started
        return self.round_trip

    async def open_stream(self) -> YamuxStream:
        """A new stream; `MuxedConnUnavailable` when the connection is over."""
        await trio.lowlevel.checkpoint()
        if self.event_closed.is_set():
            raise MuxedConnUnavailable("connection closed")
        stream = self._streams[self._next_stream_id] = YamuxStream(self._next_stream_id, self)
        self._next_stream_id += 2
        self.put(_WINDOW_UPDATE, _SYN, stream.stream_id, 0)
        return stream

    async def accept_stream(self) -> IMuxedStream:
        """The next stream that the other end opens; `MuxedConnUnavailable` when the connection is over."""
        try:
            return await self._accepted.receive()
        except trio.EndOfChannel as error:
            raise MuxedConnUnavailable("connection closed") from error

    def forget(self, stream_id: int) -> None:
        """Nothing more will happen on a stream."""
        if self._streams.pop(stream_id, None) is not None:
            self._num_inbound -= self._is_theirs(stream_id)

    def count_unread(self, change: int) -> None:
        """So many bytes more, or less, are received and not read."""
        self.num_unread += change
        if self in self._commons.conns:
            self._commons.num_unread += change

    def bear(self, cost: float) -> None:
        """The other end has made work and brought nothing; `YamuxError` when it has done so too often."""
        if not self._useless.take(trio.current_time(), cost):
            raise YamuxError("much that is of no use")

    def drop_fullest(self) -> None:
        """Break off the stream with the most that is not read; or end it all, if that is of streams that are over."""
        fullest = max(self._streams.values(), key=lambda stream: stream.num_unread, default=None)
        if fullest is not None and fullest.num_unread:
            fullest.break_off()
        else:
            self.abort()

    def _is_theirs(self, stream_id: int) -> bool:
        return stream_id % 2 != self._next_stream_id % 2

    # Writing

    def put(
        self,
        kind: int,
        flags: int,
        stream_id: int,
        length: int,
        data: bytes | memoryview = b"",
        *,
        is_bulk: bool = False,
    ) -> None:
        """Queue a frame for the writer."""
        if self.event_closed.is_set():
            return
        self._queue.append(b"".join((_HEADER.pack(0, kind, flags, stream_id, length), data)))
        self._num_queued += len(self._queue[-1])
        self._shaping.up.charge(_HEADER.size if is_bulk else len(self._queue[-1]))
        self._work.set()

    @property
    def has_room(self) -> bool:
        """Whether a data frame may be queued."""
        return self._num_queued < MAX_QUEUED_DATA or self.event_closed.is_set()

    @property
    def is_at_rest(self) -> bool:
        """Whether a data frame of bulk may be queued."""
        return not self._num_queued or self.event_closed.is_set()

    async def wait_for_room(self) -> None:
        """Until some of the queue is written."""
        if self._room.is_set():
            self._room = trio.Event()
        await self._room.wait()

    async def _write_frames(self) -> None:
        while True:
            if not self._queue:
                self._work = trio.Event()
                await self._work.wait()
            if self._num_queued > MAX_QUEUED_BYTES:
                raise YamuxError("the other end takes nothing")
            batch = [self._queue.popleft()]
            size = len(batch[0])
            while self._queue and size + len(self._queue[0]) <= MAX_MESSAGE_BYTES:
                batch.append(self._queue.popleft())
                size += len(batch[-1])
            await self.secured_conn.write(b"".join(batch))
            self._num_queued -= size
            self._room.set()

    # Reading

    async def _read_frames(self) -> None:
        while message := await self.secured_conn.read():
            self.num_received += len(message)
            num_bulk = self._feed(memoryview(message))
            self._shaping.down.charge(len(message) - num_bulk)
            if self._num_queued > MAX_QUEUED_BYTES:
                raise YamuxError("the other end takes nothing")
            await trio.lowlevel.checkpoint()  # several messages come with one read of the socket, and others wait

    def _feed(self, data: memoryview) -> int:
        """Take in what was received; returns how much of it is payload of bulk streams."""
        num_bulk = 0
        while data:
            if self._body is None:
                missing = _HEADER.size - len(self._header)
                self._header += data[:missing]
                data = data[missing:]
                if len(self._header) == _HEADER.size:
                    header = _HEADER.unpack(self._header)
                    self._header.clear()
                    self._handle(*header)
            else:
                stream, stream_id, left, flags = self._body
                piece = data[:left]
                data = data[left:]
                if stream is not None and not stream.is_reset:
                    num_bulk += len(piece) if stream.is_bulk else 0
                    stream.take(piece)
                    self._limit_unread()
                left -= len(piece)
                self._body = (stream, stream_id, left, flags) if left else None
                if not left:
                    self._handle_ending(stream_id, flags)
        return num_bulk

    def _handle(self, version: int, kind: int, flags: int, stream_id: int, length: int) -> None:
        if version != 0 or kind > _GO_AWAY:
            raise YamuxError("not yamux")
        if kind == _GO_AWAY:
            raise YamuxError(f"the other end goes away ({length})")
        if kind == _PING:
            self.bear(PING_COST)
            if flags & _SYN:
                self.put(_PING, _ACK, 0, length)
            elif length in self._pongs:
                self._pongs[length].set()
            return
        if flags & _SYN:
            self._accept(stream_id)
        stream = self._streams.get(stream_id)
        if kind == _WINDOW_UPDATE:
            if stream is None:
                self.bear(1)
            elif not flags:
                stream.add_credit(length)
            elif length:
                stream.add_credit(max(length, MIN_CREDIT))
            self._handle_ending(stream_id, flags)
            return
        if length > MAX_WINDOW:
            raise YamuxError("more than any window")
        if stream is None or not length:
            self.bear(1 + length / USELESS_BYTES)
        if stream is None and not flags & (_FIN | _RST):
            self.put(_WINDOW_UPDATE, _RST, stream_id, 0)
        if length:
            self._body = (stream, stream_id, length, flags)
        else:
            self._handle_ending(stream_id, flags)

    def _accept(self, stream_id: int) -> None:
        if not self._is_theirs(stream_id) or stream_id in self._streams:
            raise YamuxError("a stream opened twice")
        stream = YamuxStream(stream_id, self)
        try:
            if self._num_inbound >= MAX_INBOUND_STREAMS:
                raise trio.WouldBlock
            self._accepting.send_nowait(stream)
        except trio.WouldBlock:
            self.bear(REFUSAL_COST)
            self.put(_WINDOW_UPDATE, _RST, stream_id, 0)
            return
        self._streams[stream_id] = stream
        self._num_inbound += 1
        self.put(_WINDOW_UPDATE, _ACK, stream_id, 0)

    def _handle_ending(self, stream_id: int, flags: int) -> None:
        stream = self._streams.get(stream_id)
        if stream is not None and flags & _FIN:
            stream.mark_ended()
        if stream is not None and flags & _RST:
            stream.mark_reset()

    def _limit_unread(self) -> None:
        if self.num_unread > MAX_UNREAD_BYTES:
            self.drop_fullest()
        self._commons.limit()

    # The rest of the library's interface

    @property
    def is_initiator(self) -> bool:
        """Whether this end dialled."""
        return self.secured_conn.is_initiator

    @property
    def is_established(self) -> bool:
        """Whether streams can be opened."""
        return self.event_started.is_set() and not self.event_closed.is_set()

    @property
    def is_closed(self) -> bool:
        """Whether it is over."""
        return self.event_closed.is_set()

    def get_remote_address(self) -> tuple[str, int] | None:
        """Host and port of the other end."""
        return self.secured_conn.get_remote_address()

    def get_transport_addresses(self) -> list[Multiaddr]:
        """Multiaddrs of the other end as this connection sees it."""
        return self.secured_conn.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        """Direct or relayed."""
        return self.secured_conn.get_connection_type()
