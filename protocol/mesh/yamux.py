"""Yamux (github.com/hashicorp/yamux, spec.md), as libp2p uses it: the streams of one connection, without I/O.

py-libp2p 0.8.1 has a yamux of its own. It loses received data when a connection closes or a read is cancelled, corrupts
the connection when a write is cancelled, resets a stream whose reader pauses for 5 s, reports a killed peer as a clean
end, and splits a full frame into two Noise messages.

`Yamux` takes received bytes (`Yamux.receive_data`, which names the streams that changed) and returns the bytes to send
(`Yamux.data_to_send`). `YamuxStream` holds unread data, and the windows of both directions. All limits on a peer's cost
are here, except for memory that several connections share, which the driver limits (`farandole.node.mesh.yamux`).
"""

from __future__ import annotations

import math
import struct
from collections import deque
from typing import Final

from ..wire.bounds import TokenBucket
from ..wire.errors import LocalProtocolError, RemoteProtocolError

HEADER: Final = struct.Struct("!BBHII")  # version, type, flags, stream, length
DATA, WINDOW_UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8

# Header and data fill one Noise message: 65,535 - 16 of tag.
MAX_MESSAGE_BYTES: Final = 65_519
PIECE_BYTES: Final = MAX_MESSAGE_BYTES - HEADER.size
# The specification's initial receive window, and the largest window of a stream whose reader keeps up: 8 MiB is
# 1 Gbit/s at 64 ms. Unread data never makes a window grow.
INITIAL_WINDOW: Final = 256 * 1024
MAX_WINDOW: Final = 8 * 1024 * 1024
# A window doubles if it was used up within this many round trips (go-yamux).
GROW_WITHIN_ROUND_TRIPS: Final = 4
ASSUMED_ROUND_TRIP: Final = 0.1
# A window update reports that half a window was read. A smaller one is useless, and so is one beyond any window.
MIN_CREDIT: Final = 4 * 1024
MAX_CREDIT: Final = 256 * 1024 * 1024
# Streams that the peer may have open at once (the accept backlog that the specification recommends), and how many of
# them may wait to be accepted.
MAX_INBOUND_STREAMS: Final = 256
MAX_WAITING_STREAMS: Final = 64
# Bytes received and not yet read, over all streams of a connection. Above this the stream with the most is reset.
MAX_UNREAD_BYTES = 16 * 1024 * 1024
# Useless work is charged to the peer: 1 per frame and 1 more per 4 KiB of it, 2 per refused stream, 8 per ping. A token
# bucket allows the burst, which is 20 ms of work, and refills at the rate; above that the connection ends. Honest peers
# cause some: up to 8 MiB are in flight to a stream that ends here, which is 2,176 in full frames, and a burst of 1,000
# streams is refused in part.
USELESS_BURST, USELESS_PER_SECOND = 4_096.0, 64.0
USELESS_BYTES, REFUSAL_COST, PING_COST = 4 * 1024, 2, 8
# Data waits for room in the send queue, so that control frames never queue behind much. Control frames do not wait: a
# peer that causes more than MAX_QUEUED_BYTES without reading is cut off.
MAX_QUEUED_DATA: Final = 128 * 1024
MAX_QUEUED_BYTES: Final = 1024 * 1024


class YamuxStream:
    """A stream. `Yamux` makes it, and forgets it when both ends have finished or one has reset it."""

    def __init__(self, stream_id: int, conn: Yamux) -> None:
        self.stream_id = stream_id
        self.is_reset = False
        self.has_ended = False
        """Whether the peer has finished cleanly; what it sent before may be unread."""
        self.has_finished = False
        """Whether this end has finished."""
        self.is_bulk = False
        """Whether the user applies the bandwidth caps; the payload is not counted here, and goes after all else."""
        self.max_window = MAX_WINDOW
        """The largest receive window, in bytes: what the peer may send unread. Never less than the initial window."""
        self._conn = conn
        self._unread = bytearray()
        self._num_left = math.inf  # bytes that the peer may still send in all
        self.send_window = INITIAL_WINDOW
        """Bytes of data that the peer still accepts."""
        self._receive_window = INITIAL_WINDOW  # what the peer may still send
        self._window = INITIAL_WINDOW  # what it may have in flight at most
        self._consumed = 0  # read here and not yet given back as credit
        self._credited_at = -math.inf

    # Reading and writing

    @property
    def num_unread(self) -> int:
        """Return the number of bytes received and not read."""
        return len(self._unread)

    def read(self, max_bytes: int | None, now: float) -> bytes:
        """Return up to ``max_bytes`` unread bytes; empty if there are none, or at the end."""
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
    def room(self) -> int:
        """Return the number of bytes that `send` takes now.

        It is 0 without credit, without room in the connection's queue, and when this end of the stream is over.
        """
        most = 1 if self.is_bulk else MAX_QUEUED_DATA  # bulk only when the queue is empty
        may_send = not (self.has_finished or self.is_reset) and self._conn.num_queued < most
        return min(PIECE_BYTES, self.send_window) if may_send else 0

    def send(self, data: memoryview) -> int:
        """Queue the beginning of ``data``, one frame at most; return the number of bytes queued.

        Raises `LocalProtocolError` when this end has finished the stream or the stream was reset.
        """
        if self.has_finished or self.is_reset:
            raise LocalProtocolError("this end of the stream is over")
        if not (piece := data[: self.room]):
            return 0
        self.send_window -= len(piece)
        self._conn.queue(DATA, 0, self.stream_id, len(piece), piece)
        if self.is_bulk:
            self._conn.num_counted_out -= len(piece)
        return len(piece)

    def finish(self) -> None:
        """Announce that nothing follows the data that this end has sent."""
        if not self.has_finished and not self.is_reset:
            self.has_finished = True
            self._conn.queue(WINDOW_UPDATE, FIN, self.stream_id, 0)
            self._forget_if_over()

    def abandon(self) -> None:
        """Call `finish`, and accept nothing more from the peer: later data is answered by a reset."""
        self.finish()
        self._drop_unread()
        self._conn.forget(self.stream_id)

    def reset(self) -> None:
        """Abort both directions."""
        if not self.is_reset and not (self.has_finished and self.has_ended):
            self._conn.queue(WINDOW_UPDATE, RST, self.stream_id, 0)
        self.is_reset = True
        self._drop_unread()
        self._conn.forget(self.stream_id)

    def limit(self, max_bytes: int) -> None:
        """Reset the stream when the peer has sent more than ``max_bytes``, the unread bytes included."""
        self._num_left = max_bytes - len(self._unread)
        if self._num_left < 0:
            self.reset()

    # For the connection

    def take(self, data: memoryview) -> None:
        """Store received data; raise `RemoteProtocolError` if it exceeds the window."""
        self._receive_window -= len(data)
        if self._receive_window < 0:
            raise RemoteProtocolError("more data than the window of a stream")
        self._num_left -= len(data)
        if self._num_left < 0:
            return self.reset()
        self._unread += data
        self._conn.num_unread += len(data)

    def add_credit(self, amount: int) -> bool:
        """Add credit from a window update; return whether the update was useful."""
        self.send_window += amount
        is_useful = amount >= MIN_CREDIT and self.send_window <= MAX_CREDIT
        self.send_window = min(self.send_window, MAX_CREDIT)
        return is_useful

    def note_end(self) -> None:
        """Note that the peer has finished."""
        self.has_ended = True
        self._forget_if_over()

    def note_reset(self) -> None:
        """Note that the peer has reset the stream; unread data is dropped unless the peer had finished before."""
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
    """A connection. After a `RemoteProtocolError` or `end` it does nothing more."""

    def __init__(self, *, is_initiator: bool, now: float) -> None:
        """``is_initiator``: whether this end dialled; ``now``: seconds on the clock that all calls use."""
        self.num_unread = 0
        """Bytes received and not read, over all streams."""
        self.round_trip: float | None = None
        """Seconds, as last measured; None before the first answer to a ping."""
        self.num_counted_out = self.num_counted_in = 0
        """Bytes queued and received so far that count towards the bandwidth caps: all but the payload of bulk."""
        self.num_queued = 0
        """Bytes queued and not yet written (`note_sent`)."""
        self.has_ended = False
        self._streams: dict[int, YamuxStream] = {}
        self.waiting: deque[YamuxStream] = deque()
        """Streams that the peer has opened, for `accept_stream`."""
        self._num_inbound = 0
        self._next_stream_id = 1 if is_initiator else 2
        self._useless = TokenBucket(USELESS_BURST, USELESS_PER_SECOND, now)
        self._outgoing: deque[bytes] = deque()
        # Reading: the rest of an incomplete header, or the stream and the rest of an incomplete data frame
        self._header = bytearray()
        self._body: tuple[YamuxStream | None, int, int, int] | None = None  # stream, its id, bytes left, flags
        self._ping: tuple[int, float] | None = None  # the number of the unanswered one, and when it was sent

    def end(self) -> None:
        """End the connection: open streams are reset, and received data can still be read."""
        self.has_ended = True
        for stream in self._streams.values():
            stream.is_reset = True
        self._streams.clear()
        self._outgoing.clear()
        self.num_queued = 0

    def open_stream(self) -> YamuxStream:
        """Open a new stream; raise `LocalProtocolError` when the connection is over."""
        if self.has_ended:
            raise LocalProtocolError("the connection is over")
        stream = self._streams[self._next_stream_id] = YamuxStream(self._next_stream_id, self)
        self._next_stream_id += 2
        self.queue(WINDOW_UPDATE, SYN, stream.stream_id, 0)
        return stream

    def accept_stream(self) -> YamuxStream | None:
        """Return the oldest stream that the peer has opened and that is not accepted yet; None if there is none."""
        return self.waiting.popleft() if self.waiting else None

    def is_open(self, stream_id: int) -> bool:
        """Return whether anything more can happen on a stream."""
        return stream_id in self._streams

    @property
    def awaits_pong(self) -> bool:
        """Return whether the peer has not answered the last ping; `round_trip` is up to date once it has."""
        return self._ping is not None

    def ping(self, now: float, number: int) -> None:
        """Send a ping with a number of 32 random bits, in place of one that is not answered yet.

        A peer that could guess the number could answer before it receives the ping, and so seem near.
        """
        self._ping = number, now
        self.queue(PING, SYN, 0, number)

    def go_away(self) -> None:
        """Announce that this end closes the connection."""
        self.queue(GO_AWAY, 0, 0, 0)

    def reset_fullest(self) -> int | None:
        """Reset the stream with the most unread data and return its id; None if all of it is of finished streams."""
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
        self.num_queued += len(self._outgoing[-1])
        self.num_counted_out += len(self._outgoing[-1])

    def data_to_send(self) -> bytes:
        """Return the next frames, as many as fit into one Noise message; empty if none is queued."""
        batch: list[bytes] = []
        size = 0
        while self._outgoing and (not batch or size + len(self._outgoing[0]) <= MAX_MESSAGE_BYTES):
            batch.append(self._outgoing.popleft())
            size += len(batch[-1])
        return b"".join(batch)

    def note_sent(self, num_bytes: int) -> None:
        """Note that ``num_bytes`` of the output of `data_to_send` are written, which makes room for more."""
        self.num_queued = max(0, self.num_queued - num_bytes)

    # Receiving

    def receive_data(self, data: bytes, now: float) -> list[int]:
        """Process bytes, which may end anywhere in a frame; return the ids of the streams that have changed.

        A stream changes when it has new data or credit, has ended, or was reset.

        Raises `RemoteProtocolError` for bytes that no honest peer sends, and when the peer does not read the frames
        that it causes.
        """
        changed: list[int] = []
        view = memoryview(data)
        self.num_counted_in += len(data)
        try:
            while view and not self.has_ended:
                if self._body is None:
                    num_taken = self._take_header(view, now, changed)
                else:
                    num_taken = self._take_body(view, self._body, changed)
                view = view[num_taken:]
            if self.num_queued > MAX_QUEUED_BYTES:
                raise RemoteProtocolError("the peer reads nothing")
        except RemoteProtocolError:
            self.end()
            raise
        return changed

    def _take_header(self, data: memoryview, now: float, changed: list[int]) -> int:
        missing = HEADER.size - len(self._header)
        self._header += data[:missing]
        if len(self._header) == HEADER.size:
            version, kind, flags, stream_id, length = HEADER.unpack(self._header)
            self._header.clear()
            if version != 0 or kind > GO_AWAY:
                raise RemoteProtocolError("not a frame of yamux")
            if kind == GO_AWAY:
                self.end()  # what was received can still be read
            elif kind == PING:
                self._charge_useless(PING_COST, now)
                if flags & SYN:
                    self.queue(PING, ACK, 0, length)
                elif self._ping is not None and self._ping[0] == length:
                    self.round_trip, self._ping = now - self._ping[1], None
            else:
                self._handle_frame(kind, flags, stream_id, length, now, changed)
        return min(missing, len(data))

    def _take_body(self, data: memoryview, body: tuple[YamuxStream | None, int, int, int], changed: list[int]) -> int:
        stream, stream_id, left, flags = body
        piece = data[:left]
        if stream is not None and not stream.is_reset:
            self.num_counted_in -= len(piece) if stream.is_bulk else 0
            stream.take(piece)
            changed.append(stream_id)
            if self.num_unread > MAX_UNREAD_BYTES:
                fullest = self.reset_fullest()
                if fullest is None:
                    raise RemoteProtocolError("too much data of streams that are over")
                changed.append(fullest)
        left -= len(piece)
        self._body = (stream, stream_id, left, flags) if left else None
        if not left:
            self._handle_ending(stream_id, flags, changed)
        return len(piece)

    def _handle_frame(self, kind: int, flags: int, stream_id: int, length: int, now: float, changed: list[int]) -> None:
        if kind == DATA and length > MAX_WINDOW:
            raise RemoteProtocolError("a frame longer than any window")
        if flags & SYN and not self._open(stream_id):
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
                changed.append(stream_id)
            self._handle_ending(stream_id, flags, changed)
            return
        if stream is None or not length:
            self._charge_useless(1 + length / USELESS_BYTES, now)
        if stream is None and not flags & (FIN | RST):
            self.queue(WINDOW_UPDATE, RST, stream_id, 0)
        if length:
            self._body = (stream, stream_id, length, flags)
        else:
            self._handle_ending(stream_id, flags, changed)

    def _open(self, stream_id: int) -> bool:
        """Open a stream of the peer's; return False if there are too many."""
        if not self._is_theirs(stream_id) or stream_id in self._streams:
            raise RemoteProtocolError("a stream opened twice")
        if self._num_inbound >= MAX_INBOUND_STREAMS or len(self.waiting) >= MAX_WAITING_STREAMS:
            return False
        stream = self._streams[stream_id] = YamuxStream(stream_id, self)
        self.waiting.append(stream)
        self._num_inbound += 1
        self.queue(WINDOW_UPDATE, ACK, stream_id, 0)
        return True

    def _handle_ending(self, stream_id: int, flags: int, changed: list[int]) -> None:
        stream = self._streams.get(stream_id)
        if stream is not None and flags & (FIN | RST):
            if flags & FIN:
                stream.note_end()
            if flags & RST:
                stream.note_reset()
            changed.append(stream_id)

    def _charge_useless(self, cost: float, now: float) -> None:
        if not self._useless.take(now, cost):
            raise RemoteProtocolError("too many frames that are of no use")

    # For streams

    def forget(self, stream_id: int) -> None:
        """Forget a stream on which nothing more can happen."""
        if self._streams.pop(stream_id, None) is not None:
            self._num_inbound -= self._is_theirs(stream_id)

    def _is_theirs(self, stream_id: int) -> bool:
        return stream_id % 2 != self._next_stream_id % 2
