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
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import trio
from libp2p.abc import IMuxedConn, IMuxedStream, ISecureConn
from libp2p.connection_types import ConnectionType
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable

from farandole.protocol.token_bucket import TokenBucket

from ..base.bandwidth import Shaping
from .yamux_frames import ACK, FIN, GO_AWAY, HEADER, MAX_MESSAGE_BYTES, PING, RST, SYN, WINDOW_UPDATE, YamuxError
from .yamux_stream import MAX_WINDOW, MIN_CREDIT, YamuxStream

if TYPE_CHECKING:
    from multiaddr import Multiaddr

logger = logging.getLogger(__name__)

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
# Data waits for room at the writer, so that control frames never queue behind much; control frames do not wait, and
# a peer that makes us owe it this much of them without reading is cut off.
MAX_QUEUED_DATA = 128 * 1024
MAX_QUEUED_BYTES = 1024 * 1024


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
            self.put(GO_AWAY, 0, 0, 0)
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
        self.put(PING, SYN, 0, number)
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
        self.put(WINDOW_UPDATE, SYN, stream.stream_id, 0)
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
        self._queue.append(b"".join((HEADER.pack(0, kind, flags, stream_id, length), data)))
        self._num_queued += len(self._queue[-1])
        self._shaping.up.charge(HEADER.size if is_bulk else len(self._queue[-1]))
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
                missing = HEADER.size - len(self._header)
                self._header += data[:missing]
                data = data[missing:]
                if len(self._header) == HEADER.size:
                    header = HEADER.unpack(self._header)
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
        if version != 0 or kind > GO_AWAY:
            raise YamuxError("not yamux")
        if kind == GO_AWAY:
            raise YamuxError(f"the other end goes away ({length})")
        if kind == PING:
            self.bear(PING_COST)
            if flags & SYN:
                self.put(PING, ACK, 0, length)
            elif length in self._pongs:
                self._pongs[length].set()
            return
        if flags & SYN:
            self._accept(stream_id)
        stream = self._streams.get(stream_id)
        if kind == WINDOW_UPDATE:
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
        if stream is None and not flags & (FIN | RST):
            self.put(WINDOW_UPDATE, RST, stream_id, 0)
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
            self.put(WINDOW_UPDATE, RST, stream_id, 0)
            return
        self._streams[stream_id] = stream
        self._num_inbound += 1
        self.put(WINDOW_UPDATE, ACK, stream_id, 0)

    def _handle_ending(self, stream_id: int, flags: int) -> None:
        stream = self._streams.get(stream_id)
        if stream is not None and flags & FIN:
            stream.mark_ended()
        if stream is not None and flags & RST:
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
