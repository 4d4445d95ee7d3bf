"""Small frames between peers, over streams that stay open: pairing messages, and the run state's pushes.

Sending never waits and guarantees nothing. Frames to one peer of one protocol arrive in order or not at all. A full
queue drops its oldest frames (newer ones supersede them in every protocol here). A stream that fails is opened again
for what is still queued. A protocol that must know of a failed delivery gets a callback (`on_failed`).
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import trio

from farandole.protocol.wire.framing import FrameParser, frame
from farandole.protocol.wire.identity import short_name

from ..base.errors import PeerUnreachableError
from ..base.nurseries import open_service_nursery
from ..base.streams import READ_BYTES, counted
from ..mesh.host import Host
from ..mesh.yamux import Libp2pStream

logger = logging.getLogger(__name__)

# The largest frame of a protocol that this node sends without receiving it.
DEFAULT_MAX_BYTES = 1024 * 1024
# The queue for one peer, of one protocol: a push every half second for two minutes, and the size that it may have.
MAX_QUEUED_FRAMES = 256
MAX_QUEUED_BYTES = 4 * 1024 * 1024
# Streams that this node keeps open for sending: a few protocols to every neighbour and recent partner.
MAX_OUTGOING = 1024
# Streams of one protocol that one peer may have open to this node: one, and leftovers of reconnecting.
MAX_INCOMING_PER_PEER = 4
# One write to a stream takes several frames; beyond this they wait for the next.
BATCH_BYTES = 64 * 1024
SEND_TIMEOUT = 10.0
# The sender closes a stream that it has not used for this long; the receiver allows it twice that.
IDLE_TIMEOUT = 120.0
# From the first byte of a frame to its last.
FRAME_TIMEOUT = 30.0

Receive = Callable[[bytes, bytes], None]
OnFailed = Callable[[bytes], None]


class _Outgoing:
    """The queue for one peer in one protocol."""

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.wakeup = trio.Event()

    @property
    def num_bytes(self) -> int:
        """The size of the queue."""
        return sum(map(len, self.frames))


class Messenger:
    """Sends and receives frames; made by `open_messenger`."""

    def __init__(self, host: Host, nursery: trio.Nursery) -> None:
        self._host = host
        self._nursery = nursery
        self.outgoing: dict[tuple[bytes, str], _Outgoing] = {}
        """What waits to be sent, for each (peer, protocol)."""
        self._incoming: Counter[tuple[bytes, str]] = Counter()
        self._max_bytes: dict[str, int] = {}
        self._on_failed: dict[str, OnFailed] = {}

    def set_receiver(self, protocol: str, max_bytes: int, receive: Receive, on_failed: OnFailed | None = None) -> None:
        """Hand frames of a protocol, of at most `max_bytes`, to `receive(peer, payload)`.

        A `RemoteProtocolError` from it costs the peer that stream. `on_failed(peer)` is called for a peer
        that did not get something sent in this protocol. Both are called from other tasks and must not block.
        """
        self._max_bytes[protocol] = max_bytes
        if on_failed is not None:
            self._on_failed[protocol] = on_failed
        self._host.set_handler(protocol, partial(self._receive_stream, max_bytes=max_bytes, receive=receive))

    def send_nowait(self, peer: bytes, protocol: str, payload: bytes) -> None:
        """Queue a frame for a peer, connecting if need be; `LocalProtocolError` if it is larger than the protocol's."""
        framed = frame(payload, self._max_bytes.get(protocol, DEFAULT_MAX_BYTES))
        outgoing = self.outgoing.get((peer, protocol))
        if outgoing is None:
            if len(self.outgoing) >= MAX_OUTGOING:
                self._fail(peer, protocol)
                return
            outgoing = self.outgoing[peer, protocol] = _Outgoing()
            self._nursery.start_soon(self._run_outgoing, peer, protocol, outgoing)
        outgoing.frames.append(framed)
        while len(outgoing.frames) > MAX_QUEUED_FRAMES or outgoing.num_bytes > max(MAX_QUEUED_BYTES, len(framed)):
            outgoing.frames.popleft()
        outgoing.wakeup.set()

    async def _run_outgoing(self, peer: bytes, protocol: str, outgoing: _Outgoing) -> None:
        """Send what is queued, and end when the peer cannot be reached or nothing more comes."""
        try:
            while outgoing.frames:
                try:
                    stream = await self._host.open_stream(peer, protocol)
                except PeerUnreachableError as error:
                    logger.debug("nothing reaches %s: %s", short_name(peer), error)
                    break
                try:
                    await self._send_queued(stream, outgoing)
                    await stream.aclose()
                except (trio.BrokenResourceError, trio.TooSlowError) as error:
                    logger.debug("a stream of %s to %s failed: %r", protocol, short_name(peer), error)
                    self._fail(peer, protocol)
                finally:
                    stream.reset()
        finally:
            del self.outgoing[peer, protocol]
        if outgoing.frames:
            self._fail(peer, protocol)

    async def _send_queued(self, stream: Libp2pStream, outgoing: _Outgoing) -> None:
        """Send until the queue has been empty for `IDLE_TIMEOUT`, or the peer has closed its side."""

        async def watch_for_end() -> None:
            # The peer sends nothing on this stream; all that can come is its end.
            try:
                await stream.receive_some(1)
            except trio.BrokenResourceError:
                logger.debug("%s broke off a stream of %s", short_name(stream.peer), stream.protocol)
            has_ended.set()
            outgoing.wakeup.set()

        has_ended = trio.Event()
        failure: Exception | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch_for_end)
                while not has_ended.is_set():
                    if outgoing.frames:
                        batch = outgoing.frames.popleft()
                        while outgoing.frames and len(batch) + len(outgoing.frames[0]) <= BATCH_BYTES:
                            batch += outgoing.frames.popleft()
                        with trio.fail_after(SEND_TIMEOUT):
                            await stream.send_all(batch)
                    else:
                        outgoing.wakeup = trio.Event()
                        with trio.move_on_after(IDLE_TIMEOUT) as idle:
                            await outgoing.wakeup.wait()
                        if idle.cancelled_caught:
                            break
                nursery.cancel_scope.cancel()
        except* (trio.BrokenResourceError, trio.TooSlowError) as group:
            failure = group.exceptions[0]  # raised here, it would be in a group again before Python 3.11.4
        if failure is not None:
            raise failure

    def _fail(self, peer: bytes, protocol: str) -> None:
        if protocol in self._on_failed:
            self._on_failed[protocol](peer)

    async def _receive_stream(self, stream: Libp2pStream, max_bytes: int, receive: Receive) -> None:
        """Receive frames until the stream ends. Raises `RemoteProtocolError` or `trio.TooSlowError` for a fault."""
        key = (stream.peer, stream.protocol)
        if self._incoming[key] >= MAX_INCOMING_PER_PEER:
            return
        parser = FrameParser(max_bytes)
        frame_ends_by = trio.current_time() + FRAME_TIMEOUT
        with counted(self._incoming, key):
            while True:
                if not parser.buffered:
                    frame_ends_by = trio.current_time() + 2 * IDLE_TIMEOUT
                with trio.fail_at(frame_ends_by):
                    data = await stream.receive_some(READ_BYTES)
                if not data:
                    return parser.receive_eof()
                was_between_frames, num_received = not parser.buffered, 0
                parser.receive_data(data)
                while (payload := parser.next_frame()) is not None:
                    receive(stream.peer, payload)
                    num_received += 1
                if was_between_frames or num_received:
                    frame_ends_by = trio.current_time() + FRAME_TIMEOUT


@asynccontextmanager
async def open_messenger(host: Host) -> AsyncIterator[Messenger]:
    """Open a messenger while the block runs; what is still queued at its end is not sent."""
    async with open_service_nursery() as nursery:
        yield Messenger(host, nursery)
