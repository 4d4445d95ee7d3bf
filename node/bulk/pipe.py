"""Drives a pipe (`protocol.exchange.pipe`): one task reads the stream, one writes to it, and one moves the transfers.

Transfers move over a bulk channel if one opens, in threads, and otherwise over the stream, a chunk at a time. A channel
that breaks or falls silent is replaced by another or by the stream, and the rest goes over that one. The sender may
still be filling the memory during the transfer.

Messages go out in the order in which they were posted. Only the end of the pipe cancels one in the middle.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio

from farandole.protocol.exchange.pipe import (
    CHUNK_BYTES,
    CHUNK_OVERHEAD_BYTES,
    MAX_ROUTES,
    Control,
    Pipe,
    Received,
    Reroute,
    Route,
    RouteStep,
    Sealed,
    TransferReceived,
)
from farandole.protocol.wire.errors import FarandoleError

from ..base.bandwidth import Shaping
from ..base.nurseries import open_service_nursery
from ..base.streams import READ_BYTES, Stream
from .channel import BulkChannel, ChannelError
from .negotiation import BulkService

logger = logging.getLogger(__name__)

# Number of checks in the time for which a channel may be silent, or a write to the stream may take.
SILENT_CHECKS = 8
# How often to check, in seconds, while there is nothing to send: in that time a trainer encodes a few megabytes.
LOOK_INTERVAL: Final = 0.002
# A piece over a channel without pacing: the channel divides it into records.
UNLIMITED_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class Patience:
    """Timeouts of a pipe, in seconds."""

    route: float
    """Time for a bulk channel to open."""
    silent: float = math.inf
    """Time without data over a channel, after which a NAT has forgotten it, or the peer is frozen."""
    answer: float = math.inf
    """Time for the other end to agree on a route, in addition to the time for a channel to open."""
    write: float = math.inf
    """Time for the stream to take one message or chunk; checked `SILENT_CHECKS` times in that time."""


class Outgoing:
    """The data of a transfer: all of ``memory`` from the start if its hash is given, else what `num_ready` says.

    Another process may fill the memory, from the front; ``look`` returns how many bytes are ready. ``digest``: BLAKE3
    of all of it, for hashed pipes.
    """

    def __init__(self, memory: memoryview, digest: bytes | None = b"", look: Callable[[], int] = lambda: 0) -> None:
        self.memory = memory.cast("B")
        self.digest = digest
        self._look = look
        self._sealed = trio.Event()

    @property
    def num_ready(self) -> int:
        """The number of bytes that are ready."""
        return self._look() if self.digest is None else self.memory.nbytes

    def seal(self, digest: bytes) -> None:
        """Note that all is ready, with its hash."""
        self.digest = digest
        self._sealed.set()

    async def wait_beyond(self, position: int) -> int:
        """Wait until more than ``position`` bytes are ready; return how many are."""
        while (num_ready := self.num_ready) <= position:
            with trio.move_on_after(LOOK_INTERVAL):
                await self._sealed.wait()
        return num_ready

    async def wait_whole(self) -> bytes:
        """Wait until all is ready; return its hash."""
        while self.digest is None:
            await self._sealed.wait()
        return self.digest


@dataclass(eq=False)
class BulkPipe:
    """One end of a pipe over a stream and, if there is one, a bulk channel.

    ``channels``: the node's bulk channels; None: everything goes over the stream. ``max_unsent``: limit on the bytes
    that wait in the kernel of a channel; None: no limit. ``piece_bytes`` returns the most bytes of the next piece over
    a channel; ``rest`` waits before the next piece, and gets the bytes of the last one and the seconds that it took.
    """

    pipe: Pipe
    _stream: Stream
    _channels: BulkService | None
    _shaping: Shaping
    _max_unsent: int | None = None
    _piece_bytes: Callable[[], int] = lambda: UNLIMITED_BYTES
    _rest: Callable[[int, float], Awaitable[None]] | None = None

    def __post_init__(self) -> None:
        self.channel: BulkChannel | None = None
        """The bulk channel that is in use, or negotiated."""
        self.bytes_sent = 0
        self.bytes_received = 0
        self.seconds_held_up = 0.0
        """Seconds that this node's own cap has delayed what came over the stream."""
        self._patience = Patience(0.0)  # another one once transfers may move
        self._has_begun = trio.Event()
        self._posted: deque[bytes] = deque()
        self._writing = trio.Lock()  # the stream, whole frames
        self._write_began_at = math.inf
        self._is_broken = False  # it takes nothing any more
        self._is_sending = False  # a piece of a transfer
        self._is_stuck = False
        self._on_received: Callable[[int], None] = lambda name: None
        self.is_over = False
        """Whether `run` has ended."""
        self._waiting: dict[trio.Event, Callable[[], bool]] = {}
        """Conditions for which tasks wait: one each of this object's, and one of each user."""
        self._stream.is_bulk = True

    def begin(self, patience: Patience) -> None:
        """Let transfers move from now on."""
        self._patience = patience
        self._has_begun.set()
        if self.pipe.step is RouteStep.IDLE:
            self.pipe.begin()
        self._notify()

    async def run(
        self,
        on_message: Callable[[bytes], Awaitable[None]],
        on_received: Callable[[int], None] | None = None,
        received: bytes | bytearray = b"",
    ) -> None:
        """Read, write and move until the stream ends; ``received`` was read from it before.

        ``on_message`` gets the user's messages, and blocks the stream while it runs: it must not wait for a transfer.
        ``on_received`` gets the names of transfers that have arrived.

        Raises `RemoteProtocolError`, `trio.TooSlowError`, `trio.BrokenResourceError`, `trio.ClosedResourceError`, and
        the `FarandoleError` that either of the two raises.
        """
        self._on_received = on_received or self._on_received
        failures: list[Exception] = []

        async def until_failed(task: Callable[[], Awaitable[None]], is_end: bool = False) -> None:
            try:
                await task()
            except (FarandoleError, trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
                failures.append(error)
            if failures or is_end:
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(until_failed, self._write)
            nursery.start_soon(until_failed, self._move)
            nursery.start_soon(until_failed, self._watch_writes)
            await until_failed(partial(self._read, received, on_message), True)
        self.is_over = True
        self._notify()
        if failures:
            raise failures[0]

    # For the pipe's user

    def post(self, data: bytes, *, is_held: bool = False) -> None:
        """Write a frame after the ones posted before; the user of the pipe bounds their number.

        ``is_held``: `flush` follows, before any other task runs.
        """
        self._shaping.up.charge(len(data))
        self._posted.append(data)
        if not is_held:
            self._notify()

    @property
    def num_posted(self) -> int:
        """The number of frames that were posted and are not written yet."""
        return len(self._posted)

    async def drain(self) -> None:
        """Wait until everything posted is written, or the stream takes nothing any more."""
        await self._until(lambda: not self._posted)

    def add(self, source: Outgoing, *, is_held: bool = False) -> None:
        """Add the source of the transfer that was offered last; ``is_held`` as for `post`."""
        self.pipe.outgoing.open[-1].source = source
        if not is_held:
            self._notify()

    def flush(self) -> None:
        """Write posted frames and chunks of complete sources as far as this needs no wait; the tasks do the rest.

        Waking the tasks for that would cost each message several passes through the event loop.
        """
        while (self._posted or self.pipe.num_sent < self.pipe.outgoing.end) and self._write_now():
            pass
        self._notify()

    async def send(self, announce: Callable[[], tuple[bytes, Outgoing]]) -> None:
        """Send a transfer; return when all of it is sent, whether it has arrived or not.

        ``announce`` offers the transfer when its turn comes, and returns the frame that announces it and its source.
        """
        await self.wait_offerable()
        frame, source = announce()
        self.post(frame)
        self.add(source)
        end = self.pipe.outgoing.end
        await self._until(lambda: self.pipe.num_sent >= end and not self._is_sending)

    async def wait_offerable(self) -> None:
        """Wait until a transfer may be announced: post its frame, and `add` its source, before any other task runs."""
        await self._until(lambda: self.pipe.can_offer)

    async def wait_delivered(self) -> None:
        """Wait until every offered transfer is on the stream, or known to be at the other end.

        Raises `trio.ClosedResourceError` if that never happens, since `run` has ended; so does `wait_received`.
        """
        await self._until_unless_over(lambda: not (self.pipe.outgoing.open or self._is_sending or self._posted))

    async def wait_received(self) -> None:
        """Wait until every announced transfer is here."""
        await self._until_unless_over(lambda: not self.pipe.incoming.open)

    async def wait_routed(self) -> None:
        """Wait until both ends have agreed on a route."""
        await self._until(lambda: self.pipe.step in (RouteStep.CHANNEL, RouteStep.STREAM))

    def close(self, is_clean: bool = True) -> None:
        """Keep the channel for other pipes if ``is_clean`` and nothing more can come over it; otherwise close it."""
        channel, self.channel = self.channel, None
        if channel is not None and self._channels is not None:
            is_idle = not self.pipe.incoming.open and not self.pipe.outgoing.open and not self._is_sending
            (self._channels.release(channel) if is_clean and is_idle else channel.close())

    @property
    def progress(self) -> int:
        """Bytes received up to now over stream and channel, counted from an arbitrary start."""
        return self.bytes_received + (0 if self.channel is None else self.channel.num_received)

    # The stream

    async def _read(self, received: bytes | bytearray, on_message: Callable[[bytes], Awaitable[None]]) -> None:
        pipe, down = self.pipe, self._shaping.down
        while True:
            self.bytes_received += len(received)
            so_far = pipe.num_received
            pipe.receive_data(bytes(received))
            while (event := pipe.next_event()) is not None:
                match event:
                    case bytes() as payload:
                        await on_message(payload)
                    case TransferReceived(name):
                        self._on_received(name)
                self._notify()
            if pipe.step is RouteStep.STREAM and pipe.num_received > so_far:
                self.seconds_held_up += await down.wait(len(received))
            else:
                down.charge(len(received))
            received = await self._stream.receive_some(min(READ_BYTES, down.quantum))
            if not received:
                return

    async def _write(self) -> None:
        while True:
            await self._until(lambda: bool(self._posted))
            if self.pipe.step is RouteStep.STREAM and self.pipe.num_sent < self.pipe.outgoing.end:
                await trio.lowlevel.checkpoint()  # the task that sends the transfer takes them along, unless it waits
            async with self._writing:
                await self._put_posted()
            self._notify()

    async def _put_posted(self, last: bytes = b"") -> None:
        """Write all posted frames, and ``last``, in one piece: each write costs the other end a read, too.

        If the stream is broken, drop them: earlier messages of the other end must still be read.
        """
        num_frames = len(self._posted)
        if self._is_broken:
            await trio.lowlevel.checkpoint()
        elif data := b"".join([*self._posted, last]):
            try:
                self._write_began_at = trio.current_time()
                await self._stream.send_all(data)
                self.bytes_sent += len(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                logger.debug("writing to the stream broke off: %s", error)
                self._is_broken = True
            finally:
                self._write_began_at = math.inf
        for _ in range(num_frames):
            self._posted.popleft()

    async def _watch_writes(self) -> None:
        """Raise `trio.TooSlowError` when a write takes too long: a scope around each would cost a twelfth of it."""
        await self._has_begun.wait()
        timeout = self._patience.write
        while timeout < math.inf:
            await trio.sleep(timeout / SILENT_CHECKS)
            if trio.current_time() >= self._write_began_at + timeout:
                raise trio.TooSlowError

    def _write_now(self) -> bool:
        """Write what is posted, with the next chunk, unless something has to wait; return whether it is written."""
        room = self._stream.room - sum(map(len, self._posted))
        if room < 0 or self._is_broken or self._writing.locked():
            return False
        chunk = b""
        is_due = self.pipe.step is RouteStep.STREAM and self.pipe.num_sent < self.pipe.outgoing.end
        if is_due and not self._is_sending:
            source, position = self._next_source()
            size = min(source.memory.nbytes - position, self._chunk_bytes())
            if (
                source.num_ready < source.memory.nbytes
                or CHUNK_OVERHEAD_BYTES + size > room
                or not self._shaping.up.has(size)
            ):
                return False
            self._shaping.up.reserve(size)
            chunk = self.pipe.send_chunk(source.memory[position : position + size])
        if not (data := b"".join([*self._posted, chunk])):
            return False
        self._posted.clear()
        self._stream.send_now(data)
        self.bytes_sent += len(data)
        return True

    # The routes

    async def _move(self) -> None:
        await self._has_begun.wait()
        if self.pipe.is_large:
            await self._agree()
        while (channel := self.channel) is not None:
            if self._max_unsent is not None:
                channel.limit_unsent(self._max_unsent)
            self._is_stuck = False
            async with open_service_nursery() as nursery:  # after which no thread is active any more
                nursery.start_soon(self._send_over, channel)
                nursery.start_soon(self._receive_over, channel)
                if self.pipe.is_opener:
                    await self._until(lambda: self._is_stuck or self.pipe.step is RouteStep.LOST)
                else:
                    await self._until(lambda: self.pipe.step is RouteStep.REPLACING)
            self.close(is_clean=False)
            await self._agree()
        await self._send_over_stream()

    async def _agree(self) -> None:
        """Agree on the next route; nothing moves during this time."""
        pipe, patience, peer = self.pipe, self._patience, self._stream.peer
        if not pipe.is_opener:
            with trio.fail_after(patience.route + patience.answer):
                await self._until(lambda: pipe.step in (RouteStep.PROPOSED, RouteStep.REPLACING))
            if self._channels is not None and pipe.proposed is not None:
                self.channel = self._channels.take(peer, pipe.proposed)
        elif self._channels is not None and pipe.num_routes < MAX_ROUTES - 1:
            with trio.move_on_after(patience.route):
                self.channel = await self._channels.acquire(peer)
        self._settle_whole()
        self._send(Route(None if self.channel is None else self.channel.session, pipe.num_received))
        if pipe.is_opener:
            with trio.fail_after(patience.answer):
                await self.wait_routed()
            if pipe.channel is None:
                self.close(is_clean=False)  # the answerer does not have it

    def _send(self, message: Control) -> None:
        self.post(self.pipe.send(message))

    # Receiving over a channel

    async def _receive_over(self, channel: BulkChannel) -> None:
        """Receive until the channel breaks or is silent: on a slow line, a record takes seconds."""
        patience, flow = self._patience.silent, self.pipe.incoming

        async def cancel_when_silent() -> None:
            num_before, heard_at = channel.num_received, trio.current_time()
            while trio.current_time() < heard_at + patience:
                await trio.sleep(patience / SILENT_CHECKS)
                if channel.num_received > num_before:
                    num_before, heard_at = channel.num_received, trio.current_time()
            nursery.cancel_scope.cancel()

        while True:
            await self._until(lambda: bool(flow.open))
            arriving = self.pipe.arriving
            assert arriving is not None, "what comes has a place"
            before = arriving.position
            try:
                async with open_service_nursery() as nursery:
                    nursery.start_soon(cancel_when_silent)
                    try:
                        await channel.receive(arriving)
                    except ChannelError as error:
                        logger.debug("receiving over the bulk channel broke off: %s", error)
            finally:
                self.bytes_received += arriving.position - before
            if arriving.rest:
                break
            await self._until(lambda: flow.is_head_sealed)
            self._settle_whole()
        self._is_stuck = True
        if not self.pipe.is_opener and self.pipe.step is RouteStep.CHANNEL:
            self._send(Reroute())
        self._notify()

    def _settle_whole(self) -> None:
        """Compare the hash of a transfer, and report it, if all of it has come over the channel."""
        if (arriving := self.pipe.arriving) is not None and not arriving.rest:
            name = self.pipe.check_whole()
            self._send(Received())
            self._on_received(name)
            self._notify()

    # Sending

    async def _next_piece(self, most: Callable[[], int]) -> memoryview:
        """Return the next bytes to send, at most ``most()``; the hash is sent before the last piece of a transfer."""
        flow = self.pipe.outgoing
        await self._until(lambda: self.pipe.num_sent < flow.end)
        source, position = self._next_source()
        num_ready = await source.wait_beyond(position)
        if num_ready == source.memory.nbytes and not flow.is_head_sealed:
            self._send(Sealed(await source.wait_whole()))
        return source.memory[position : min(num_ready, position + most())]

    def _next_source(self) -> tuple[Outgoing, int]:
        """Return the source of the next byte to send, and the byte's position in it."""
        transfer = next(each for each in self.pipe.outgoing.open if each.end > self.pipe.num_sent)
        source: Outgoing = transfer.source
        return source, self.pipe.num_sent - (transfer.end - source.memory.nbytes)

    def _chunk_bytes(self) -> int:
        """Return the most bytes of a chunk that, with all posted frames before it, fits in one Noise message."""
        room = max(CHUNK_BYTES - sum(map(len, self._posted)), CHUNK_BYTES // 2)
        return min(room, self._shaping.up.quantum)

    async def _send_over(self, channel: BulkChannel) -> None:
        before = channel.num_sent
        try:
            while True:
                piece = await self._next_piece(self._piece_bytes)
                began_at, end, self._is_sending = trio.current_time(), self.pipe.num_sent + piece.nbytes, True
                await channel.send(piece)
                if self.pipe.step is not RouteStep.REPLACING:  # else the other end has said where to continue
                    self.pipe.num_sent = max(self.pipe.num_sent, end)  # it may have reported all of it already
                self._is_sending = False
                self._notify()
                if self._rest is not None:
                    await self._rest(piece.nbytes, trio.current_time() - began_at)
        except ChannelError as error:
            logger.debug("sending over the bulk channel broke off: %s", error)  # the other end says what it lacks
        finally:
            self._is_sending = False
            self.bytes_sent += channel.num_sent - before
        await self._until(lambda: bool(self.pipe.outgoing.open))
        with trio.fail_after(self._patience.route + self._patience.answer):
            await trio.sleep_forever()  # cancelled with the next route

    async def _send_over_stream(self) -> None:
        while True:
            piece = await self._next_piece(self._chunk_bytes)
            began_at = trio.current_time()
            self._is_sending = True  # so `flush` does not send this piece while it waits
            try:
                await self._shaping.up.wait(piece.nbytes)
                if self._writing.locked():  # each pass through the event loop costs a tenth of what a chunk does
                    await self._writing.acquire()
                else:
                    self._writing.acquire_nowait()
                try:
                    await self._put_posted(self.pipe.send_chunk(piece))
                finally:
                    self._writing.release()
            finally:
                self._is_sending = False
            if self.pipe.num_sent >= self.pipe.outgoing.head_end:  # until then, no task waits for a chunk
                self._notify()
            if self._rest is not None:
                await self._rest(piece.nbytes, trio.current_time() - began_at)

    # Waiting

    def _notify(self) -> None:
        """Wake those tasks whose condition holds now."""
        for event, holds in self._waiting.items():
            if holds():
                event.set()

    async def _until_unless_over(self, holds: Callable[[], bool]) -> None:
        await self._until(lambda: holds() or self.is_over)
        if not holds():
            raise trio.ClosedResourceError("the pipe has ended")

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._waiting[event := trio.Event()] = holds
            try:
                await event.wait()
            finally:
                del self._waiting[event]
