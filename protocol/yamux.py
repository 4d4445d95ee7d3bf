"""Yamux (github.com/hashicorp/yamux, spec.md), as libp2p uses it: the streams of one connection, without I/O.

py-libp2p 0.8.1 has a yamux of its own. It loses received data when a connection closes or a read is cancelled, corrupts
the connection when a write is cancelled, resets a stream whose reader pauses for 5 s, reports a killed peer as a clean
end, and splits a full frame into two Noise messages.

`Yamux` takes the bytes that arrive (`Yamux.receive_data`, which returns events) and hands out the bytes to send
(`Yamux.data_to_send`). `YamuxStream` holds what has arrived and is not read, and the windows of both directions. Every
limit on what a peer may cost lives here. The memory that several connections share is the driver's business
(`farandole.node.mesh.yamux`).
"""

from __future__ import annotations

import math
import struct
from collections import deque
from dataclasses import dataclass
from typing import Final

from .errors import LocalProtocolError, RemoteProtocolError
from .token_bucket import TokenBucket

HEADER: Final = struct.Struct("!BBHII")  # version, type, flags, stream, length
DATA, WINDOW_UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8

# Header and data fill one Noise message: 65,535 - 16 of tag.
MAX_MESSAGE_BYTES: Final = 65_519
PIECE_BYTES: Final = MAX_MESSAGE_BYTES - HEADER.size
# The receive window that the specification starts with, and how far a stream's grows while its reader keeps up: 8 MiB
# is 1 Gbit/s at 64 ms. Unread data never makes a window grow.
INITIAL_WINDOW: Final = 256 * 1024
MAX_WINDOW: Final = 8 * 1024 * 1024
# A window doubles if it was used up within this many round trips (go-yamux).
GROW_WITHIN_ROUND_TRIPS: Final = 4
ASSUMED_ROUND_TRIP: Final = 0.1
# A window update says that half a window was read. A smaller one is useless, and so is one beyond any window.
MIN_CREDIT: Final = 4 * 1024
MAX_CREDIT: Final = 256 * 1024 * 1024
# Streams that the peer may have open at once (the accept backlog that the specification recommends), and those of them
# that are not accepted yet.
MAX_INBOUND_STREAMS: Final = 256
MAX_WAITING_STREAMS: Final = 64
# Received and not yet read, over all streams of a connection. Above this the stream with the most is reset.
MAX_UNREAD_BYTES = 16 * 1024 * 1024
# Work for nothing costs the peer: a frame 1, and 1 more for each 4 KiB of it; a refused stream 2; a ping 8. It may
# owe the burst, which is 20 ms of work, and pays off the rate; above that the connection ends. Honest peers cause some:
# up to 8 MiB are in flight to a stream that ends here, 2,176 in full frames, and a burst of 1,000 streams is refused in
# part.
USELESS_BURST, USELESS_PER_SECOND = 4_096.0, 64.0
USELESS_BYTES, REFUSAL_COST, PING_COST = 4 * 1024, 2, 8
# Data waits for room in the send queue, so that control frames never queue behind much. Control frames do not wait: a
# peer that causes this much of them without reading is cut off.
MAX_QUEUED_DATA: Final = 128 * 1024
MAX_QUEUED_BYTES: Final = 1024 * 1024
# Pings of this end that are not answered. The driver sends one at a time.
MAX_PINGS: Final = 16


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """The peer has opened a stream; `Yamux.accept_stream` returns it."""


@dataclass(frozen=True, slots=True)
class StreamChanged:
    """A stream has data, credit, an end or a reset that it did not have before."""

    stream_id: int


@dataclass(frozen=True, slots=True)
class PingAnswered:
    """The peer has answered a ping of this end; `Yamux.round_trip` is up to date."""

    number: int


@dataclass(frozen=True, slots=True)
class GoneAway:
    """The peer has ended the connection. What was received can still be read."""

    code: int


Event = StreamOpened | StreamChanged | PingAnswered | GoneAway


class YamuxStream:
    """One stream. `Yamux` makes it, and forgets it when both ends have finished or one has reset it."""

    def __init__(self, stream_id: int, conn: Yamux) -> None:
        self.stream_id = stream_id
        self.is_reset = False
        self.has_ended = False
        """Whether the peer has finished cleanly; what it sent before may be unread."""
        self.has_finished = False
        """Whether this end has finished."""
        self.is_bulk = False
        """Whether the user keeps to the bandwidth caps; its payload is not counted and goes behind everything else."""
        self.max_window = MAX_WINDOW
        """How far the receive window may grow, in bytes."""
        self._conn = conn
        self._unread = bytearray()
        self._num_left = math.inf  # bytes that the peer may still send in all
        self._send_window = INITIAL_WINDOW
        self._receive_window = INITIAL_WINDOW  # what the peer may still send
        self._window = INITIAL_WINDOW  # what it may have in flight at most
        self._consumed = 0  # read here and not yet given back as credit
        self._credited_at = -math.inf

    # Reading and writing

    @property
    def num_unread(self) -> int:
        """Bytes received and not read."""
        return len(self._unread)

    def read(self, max_bytes: int | None, now: float) -> bytes:
        """What has arrived, ``max_bytes`` at most; empty if nothing has, or at the end."""
        if max_bytes is None or max_bytes < 0 or max_bytes >= len(self._unread):
            data = bytes(self._unread)
            self._unread.clear()
        else:
            data = bytes(memoryview(self._unread)[:max_bytes])
            del self._unread[:max_bytes]
        self._conn.num_unread -= len(data)
        self._give_credit(len(data), now)
        return data

    @property
    def has_credit(self) -> bool:
        """Whether the peer takes data of this stream."""
        return self._send_window > 0

    @property
    def may_send(self) -> bool:
        """Whether `send` takes at least one byte: there is credit, and room in the connection's queue."""
        return self.has_credit and self._conn.has_room(is_bulk=self.is_bulk)

    def send(self, data: memoryview) -> int:
        """Queue the beginning of ``data``, one frame at most; returns how many bytes that is.

        Raises `LocalProtocolError` when this end has finished the stream or the stream was reset.
        """
        if self.has_finished or self.is_reset:
            raise LocalProtocolError("this end of the stream is over")
        if not self.may_send:
            return 0
        piece = data[: min(PIECE_BYTES, self._send_window)]
        self._send_window -= len(piece)
        self._conn.queue(DATA, 0, self.stream_id, len(piece), piece)
        if self.is_bulk:
            self._conn.num_counted_out -= len(piece)
        return len(piece)

    def finish(self) -> None:
        """Say that nothing more comes from this end, after what was sent."""
        if not self.has_finished and not self.is_reset:
            self.has_finished = True
            self._conn.queue(WINDOW_UPDATE, FIN, self.stream_id, 0)
            self._forget_if_over()

    def abandon(self) -> None:
        """`finish`, and take nothing more from the peer: what it still sends is answered by a reset."""
        self.finish()
        self._drop_unread()
        self._conn.forget(self.stream_id)

    def reset(self) -> None:
        """Break both directions off."""
        if not self.is_reset and not (self.has_finished and self.has_ended):
            self._conn.queue(WINDOW_UPDATE, RST, self.stream_id, 0)
        self.is_reset = True
        self._drop_unread()
        self._conn.forget(self.stream_id)

    def limit(self, max_bytes: int) -> None:
        """Reset the stream when the peer has sent more than this; what it has sent so far counts."""
        self._num_left = max_bytes - len(self._unread)
        if self._num_left < 0:
            self.reset()

    # For the connection

    def take(self, data: memoryview) -> None:
        """Data has arrived; `RemoteProtocolError` if it is more than the window."""
        self._receive_window -= len(data)
        if self._receive_window < 0:
            raise RemoteProtocolError("more data than the window of a stream")
        self._num_left -= len(data)
        if self._num_left < 0:
            return self.reset()
        self._unread += data
        self._conn.num_unread += len(data)

    def add_credit(self, amount: int) -> bool:
        """The peer has read something; returns whether the update was of use."""
        self._send_window += amount
        is_useful = amount >= MIN_CREDIT and self._send_window <= MAX_CREDIT
        self._send_window = min(self._send_window, MAX_CREDIT)
        return is_useful

    def note_end(self) -> None:
        """The peer has finished."""
        self.has_ended = True
        self._forget_if_over()

    def note_reset(self) -> None:
        """The peer has reset the stream, and with it what was not read, unless it had finished before."""
        if not self.has_ended:
            self._drop_unread()
        self.is_reset = True
        self._conn.forget(self.stream_id)

    def _give_credit(self, amount: int, now: float) -> None:
        self._consumed += amount
        if self.has_ended or self.is_reset or self._consumed < self._window // 2:
            return
        increment = self._consumed
        soon = GROW_WITHIN_ROUND_TRIPS * (self._conn.round_trip or ASSUMED_ROUND_TRIP)
        if now - self._credited_at < soon and self._window < self.max_window:
            increment += self._window
            self._window *= 2
        self._credited_at = now
        self._consumed = 0
        self._receive_window += increment
        self._conn.queue(WINDOW_UPDATE, 0, self.stream_id, increment)

    def _drop_unread(self) -> None:
        self._conn.num_unread -= len(self._unread)
        self._unread.clear()

    def _forget_if_over(self) -> None:
        if self.has_finished and self.has_ended:
            self._conn.forget(self.stream_id)


class Yamux:
    """One connection. After a `RemoteProtocolError` or `end` it does nothing more."""

    def __init__(self, *, is_initiator: bool, now: float) -> None:
        """``is_initiator``: whether this end dialled; ``now``: seconds on the clock that all calls use."""
        self.num_unread = 0
        """Bytes received and not read, over all streams."""
        self.round_trip: float | None = None
        """Seconds, as last measured; None before the first answer to a ping."""
        self.num_counted_out = self.num_counted_in = 0
        """Bytes queued and received so far that count towards the bandwidth caps: all but the payload of bulk."""
        self.has_ended = False
        self._streams: dict[int, YamuxStream] = {}
        self._waiting: deque[YamuxStream] = deque()
        self._num_inbound = 0
        self._next_stream_id = 1 if is_initiator else 2
        self._useless = TokenBucket(USELESS_BURST, USELESS_PER_SECOND, now)
        self._outgoing: deque[bytes] = deque()
        self._num_queued = 0
        # Reading: the rest of an incomplete header, or the stream and the rest of an incomplete data frame
        self._header = bytearray()
        self._body: tuple[YamuxStream | None, int, int, int] | None = None  # stream, its id, bytes left, flags
        self._ping_number = 0
        self._pings: dict[int, float] = {}

    def end(self) -> None:
        """The connection is gone: open streams are reset, and what was received can still be read."""
        self.has_ended = True
        for stream in self._streams.values():
            stream.is_reset = True
        self._streams.clear()
        self._outgoing.clear()
        self._num_queued = 0

    def open_stream(self) -> YamuxStream:
        """A new stream; `LocalProtocolError` when the connection is over."""
        if self.has_ended:
            raise LocalProtocolError("the connection is over")
        stream = self._streams[self._next_stream_id] = YamuxStream(self._next_stream_id, self)
        self._next_stream_id += 2
        self.queue(WINDOW_UPDATE, SYN, stream.stream_id, 0)
        return stream

    def accept_stream(self) -> YamuxStream | None:
        """The oldest stream that the peer has opened and that is not accepted yet; None if there is none."""
        return self._waiting.popleft() if self._waiting else None

    def is_open(self, stream_id: int) -> bool:
        """Whether anything more can happen on a stream."""
        return stream_id in self._streams

    def ping(self, now: float) -> int:
        """Send a ping; returns its number, which `PingAnswered` has."""
        self._ping_number = (self._ping_number + 1) % 2**32
        while len(self._pings) >= MAX_PINGS:
            del self._pings[next(iter(self._pings))]
        self._pings[self._ping_number] = now
        self.queue(PING, SYN, 0, self._ping_number)
        return self._ping_number

    def go_away(self) -> None:
        """Say that this end closes the connection."""
        self.queue(GO_AWAY, 0, 0, 0)

    def reset_fullest(self) -> int | None:
        """Reset the stream with the most unread data; returns its id, or None if all of that is of finished streams."""
        fullest = max(self._streams.values(), key=lambda stream: stream.num_unread, default=None)
        if fullest is None or not fullest.num_unread:
            return None
        fullest.reset()
        return fullest.stream_id

    # Sending

    def queue(self, kind: int, flags: int, stream_id: int, length: int, data: bytes | memoryview = b"") -> None:
        """Queue a frame. For streams; nothing is queued once the connection is over."""
        if self.has_ended:
            return
        self._outgoing.append(b"".join((HEADER.pack(0, kind, flags, stream_id, length), data)))
        self._num_queued += len(self._outgoing[-1])
        self.num_counted_out += len(self._outgoing[-1])

    def has_room(self, *, is_bulk: bool = False) -> bool:
        """Whether a data frame may be queued; one of bulk only when nothing else is on its way."""
        return self._num_queued < MAX_QUEUED_DATA if not is_bulk else not self._num_queued

    @property
    def num_queued(self) -> int:
        """Bytes queued and not yet written (`note_sent`)."""
        return self._num_queued

    def data_to_send(self) -> bytes:
        """The next frames, as many as fit into one message of Noise; empty if none is queued."""
        batch: list[bytes] = []
        size = 0
        while self._outgoing and (not batch or size + len(self._outgoing[0]) <= MAX_MESSAGE_BYTES):
            batch.append(self._outgoing.popleft())
            size += len(batch[-1])
        return b"".join(batch)

    def note_sent(self, num_bytes: int) -> None:
        """So much of what `data_to_send` returned is written: there is room for more."""
        self._num_queued = max(0, self._num_queued - num_bytes)

    # Receiving

    def receive_data(self, data: bytes, now: float) -> list[Event]:
        """Take in bytes, which may end anywhere in a frame; returns what they caused.

        Raises `RemoteProtocolError` for what no honest peer sends, and when the peer reads nothing of what it causes.
        """
        events: list[Event] = []
        view = memoryview(data)
        self.num_counted_in += len(data)
        try:
            while view and not self.has_ended:
                if self._body is None:
                    num_taken = self._take_header(view, now, events)
                else:
                    num_taken = self._take_body(view, self._body, events)
                view = view[num_taken:]
            if self._num_queued > MAX_QUEUED_BYTES:
                raise RemoteProtocolError("the peer reads nothing")
        except RemoteProtocolError:
            self.end()
            raise
        return events

    def _take_header(self, data: memoryview, now: float, events: list[Event]) -> int:
        missing = HEADER.size - len(self._header)
        self._header += data[:missing]
        if len(self._header) == HEADER.size:
            version, kind, flags, stream_id, length = HEADER.unpack(self._header)
            self._header.clear()
            if version != 0 or kind > GO_AWAY:
                raise RemoteProtocolError("not a frame of yamux")
            if kind == GO_AWAY:
                self.end()
                events.append(GoneAway(length))
            elif kind == PING:
                self._handle_ping(flags, length, now, events)
            else:
                self._handle_frame(kind, flags, stream_id, length, now, events)
        return min(missing, len(data))

    def _take_body(self, data: memoryview, body: tuple[YamuxStream | None, int, int, int], events: list[Event]) -> int:
        stream, stream_id, left, flags = body
        piece = data[:left]
        if stream is not None and not stream.is_reset:
            self.num_counted_in -= len(piece) if stream.is_bulk else 0
            stream.take(piece)
            events.append(StreamChanged(stream_id))
            if self.num_unread > MAX_UNREAD_BYTES:
                fullest = self.reset_fullest()
                if fullest is None:
                    raise RemoteProtocolError("too much data of streams that are over")
                events.append(StreamChanged(fullest))
        left -= len(piece)
        self._body = (stream, stream_id, left, flags) if left else None
        if not left:
            self._handle_ending(stream_id, flags, events)
        return len(piece)

    def _handle_ping(self, flags: int, number: int, now: float, events: list[Event]) -> None:
        self._charge_useless(PING_COST, now)
        sent_at = self._pings.pop(number, None) if not flags & SYN else None
        if flags & SYN:
            self.queue(PING, ACK, 0, number)
        elif sent_at is not None:
            self.round_trip = now - sent_at
            events.append(PingAnswered(number))

    def _handle_frame(
        self, kind: int, flags: int, stream_id: int, length: int, now: float, events: list[Event]
    ) -> None:
        if kind == DATA and length > MAX_WINDOW:
            raise RemoteProtocolError("a frame longer than any window")
        if flags & SYN and not self._open(stream_id, events):
            self._charge_useless(REFUSAL_COST, now)
            self.queue(WINDOW_UPDATE, RST, stream_id, 0)
            self._body = (None, stream_id, length, flags) if kind == DATA and length else None
            return
        stream = self._streams.get(stream_id)
        if kind == WINDOW_UPDATE:
            if stream is None:
                self._charge_useless(1, now)
            elif length or not flags:
                is_useful = stream.add_credit(length)
                if not is_useful and not flags:
                    self._charge_useless(1, now)
                events.append(StreamChanged(stream_id))
            self._handle_ending(stream_id, flags, events)
            return
        if stream is None or not length:
            self._charge_useless(1 + length / USELESS_BYTES, now)
        if stream is None and not flags & (FIN | RST):
            self.queue(WINDOW_UPDATE, RST, stream_id, 0)
        if length:
            self._body = (stream, stream_id, length, flags)
        else:
            self._handle_ending(stream_id, flags, events)

    def _open(self, stream_id: int, events: list[Event]) -> bool:
        """Open a stream of the peer's; returns False if there are too many."""
        if not self._is_theirs(stream_id) or stream_id in self._streams:
            raise RemoteProtocolError("a stream opened twice")
        if self._num_inbound >= MAX_INBOUND_STREAMS or len(self._waiting) >= MAX_WAITING_STREAMS:
            return False
        stream = self._streams[stream_id] = YamuxStream(stream_id, self)
        self._waiting.append(stream)
        self._num_inbound += 1
        self.queue(WINDOW_UPDATE, ACK, stream_id, 0)
        events.append(StreamOpened())
        return True

    def _handle_ending(self, stream_id: int, flags: int, events: list[Event]) -> None:
        stream = self._streams.get(stream_id)
        if stream is not None and flags & (FIN | RST):
            if flags & FIN:
                stream.note_end()
            if flags & RST:
                stream.note_reset()
            events.append(StreamChanged(stream_id))

    def _charge_useless(self, cost: float, now: float) -> None:
        if not self._useless.take(now, cost):
            raise RemoteProtocolError("too many frames that are of no use")

    # For streams

    def forget(self, stream_id: int) -> None:
        """Nothing more will happen on a stream."""
        if self._streams.pop(stream_id, None) is not None:
            self._num_inbound -= self._is_theirs(stream_id)

    def _is_theirs(self, stream_id: int) -> bool:
        return stream_id % 2 != self._next_stream_id % 2
