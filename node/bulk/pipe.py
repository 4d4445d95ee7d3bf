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
from typing import Protocol

import trio

from farandole.protocol.exchange.pipe import (
    CHUNK_BYTES,
    CHUNK_OVERHEAD_BYTES,
    MAX_ROUTES,
    Pipe,
    Received,
    Reroute,
    Route,
    RouteStep,
    Sealed,
    TransferReceived,
)
from farandole.protocol.wire.errors import FarandoleError, LocalProtocolError
from farandole.protocol.wire.incoming import Incoming

from ..base.bandwidth import Shaping
from ..base.nurseries import open_service_nursery
from ..base.streams import READ_BYTES, Stream
from .channel import ChannelError
from .transport import Channel, Transport

logger = logging.getLogger(__name__)

# Number of checks in the time for which a channel may be silent, or a write to the stream may take.
SILENT_CHECKS = 8
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


class Source(Protocol):
    """The data of a transfer: ``memory`` is filled from the front."""

    @property
    def memory(self) -> memoryview:
        """The whole memory; only bytes that are ready may be read."""

    async def wait_beyond(self, position: int) -> int:
        """Wait until more than ``position`` bytes are ready; return how many are."""

    async def wait_whole(self) -> bytes:
        """Wait until all is ready; return its BLAKE3. Only hashed pipes use it."""


class Whole:
    """A source that is complete from the start, for pipes without hashes."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory.cast("B")

    async def wait_beyond(self, position: int) -> int:
        """Return the size: everything is ready."""
        return self.memory.nbytes

    async def wait_whole(self) -> bytes:
        """Raise `LocalProtocolError`: a pipe without hashes never asks for one."""
        raise LocalProtocolError("a pipe without hashes asks for no hash")


class Pacing(Protocol):
    """Sets the rate at which transfers are sent."""

    def piece_bytes(self) -> int:
        """Return the maximum size in bytes of the next piece over a channel."""

    async def rest(self, num_bytes: int, seconds: float) -> None:
        """Wait before the next piece; the last one had ``num_bytes`` and took ``seconds``."""


class BulkPipe:
    """One end of a pipe over a stream and, if there is one, a bulk channel.

    ``max_unsent``: limit on the bytes that wait in the kernel of a channel; None: no limit.
    """

    def __init__(
        self,
        pipe: Pipe,
        stream: Stream,
        transport: Transport,
        shaping: Shaping,
        pacing: Pacing | None = None,
        max_unsent: int | None = None,
    ) -> None:
        self.pipe = pipe
        self.bytes_sent = 0
        self.bytes_received = 0
        self.seconds_held_up = 0.0
        """Seconds that this node's own cap has delayed what came over the stream."""
        self._stream = stream
        self._transport = transport
        self._shaping = shaping
        self._pacing = pacing
        self._max_unsent = max_unsent
        self._patience: Patience | None = None  # once transfers may move
        self._posted: deque[bytes] = deque()
        self._sources: deque[tuple[int, Source]] = deque()  # (end, source) of what may have to be sent again
        self._writing = trio.Lock()  # the stream, whole frames
        self._write_began_at = math.inf
        self._is_broken = False  # it takes nothing any more
        self._is_sending = False  # a piece of a transfer
        self._is_stuck = False
        self.is_over = False
        """Whether `run` has ended."""
        self._waiting: dict[trio.Event, Callable[[], bool]] = {}
        """Conditions for which tasks wait: one each of this object's, and one of each user."""
        stream.is_bulk = True

    def begin(self, patience: Patience) -> None:
        """Let transfers move from now on."""
        self._patience = patience
        if self.pipe.step is RouteStep.IDLE:
            self.pipe.begin()
        self._notify()

    async def run(
        self,
        on_message: Callable[[bytes], Awaitable[None]],
        on_received: Callable[[int], None],
        received: bytes | bytearray = b"",
    ) -> None:
        """Read, write and move until the stream ends; ``received`` was read from it before.

        ``on_message`` gets the user's messages, and blocks the stream while it runs: it must not wait for a transfer.
        ``on_received`` gets the names of transfers that have arrived.

        Raises `RemoteProtocolError`, `trio.TooSlowError`, `trio.BrokenResourceError`, `trio.ClosedResourceError`, and
        the `FarandoleError` that either of the two raises.
        """
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
            nursery.start_soon(until_failed, partial(self._move, on_received))
            nursery.start_soon(until_failed, self._seal_all)
            nursery.start_soon(until_failed, self._watch_writes)
            await until_failed(partial(self._read, received, on_message, on_received), True)
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

    def add(self, source: Source, *, is_held: bool = False) -> None:
        """Add the source of the transfer that was offered last; ``is_held`` as for `post`."""
        self._sources.append((self.pipe.outgoing.end, source))
        if not is_held:
            self._notify()

    def flush(self) -> None:
        """Write posted frames and chunks of complete sources as far as this needs no wait; the tasks do the rest.

        Waking the tasks for that would cost each message several passes through the event loop.
        """
        while (self._posted or self.pipe.num_sent < self.pipe.outgoing.end) and self._write_now():
            pass
        self._notify()

    async def send(self, announce: Callable[[], tuple[bytes, Source] | None]) -> None:
        """Send a transfer; return when all of it is sent, whether it has arrived or not.

        ``announce`` offers the transfer when its turn comes, and returns the frame that announces it and its source;
        None cancels it.
        """
        await self.wait_offerable()
        if (announced := announce()) is None:
            return
        frame, source = announced
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
        await self._until_or_over(lambda: not (self.pipe.outgoing.is_open or self._is_sending or self._posted))

    async def wait_received(self) -> None:
        """Wait until every announced transfer is here."""
        await self._until_or_over(lambda: not self.pipe.incoming.is_open)

    async def wait_routed(self) -> None:
        """Wait until both ends have agreed on a route."""
        await self._until(lambda: self.pipe.step in (RouteStep.CHANNEL, RouteStep.STREAM))

    def close(self, is_clean: bool = True) -> None:
        """Keep the channel for other pipes if nothing more can come over it; otherwise close it."""
        is_idle = not self.pipe.incoming.is_open and not self.pipe.outgoing.is_open and not self._is_sending
        (self._transport.keep if is_clean and is_idle else self._transport.discard)()

    @property
    def progress(self) -> int:
        """Bytes received up to now over stream and channel, counted from an arbitrary start."""
        channel = self._transport.channel
        return self.bytes_received + (0 if channel is None else channel.num_received)

    @property
    def seconds_capped(self) -> float:
        """Seconds that this node's cap has delayed incoming data on stream and channel, from an arbitrary start."""
        channel = self._transport.channel
        return self.seconds_held_up + (0.0 if channel is None else channel.seconds_held_up)

    # The stream

    async def _read(
        self,
        received: bytes | bytearray,
        on_message: Callable[[bytes], Awaitable[None]],
        on_received: Callable[[int], None],
    ) -> None:
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
                        on_received(name)
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
        """Write all posted frames, and ``last``, in one piece: each write costs the other end a read, too."""
        num_frames = len(self._posted)
        if num_frames or last:
            await self._put(b"".join([*self._posted, last]))
        for _ in range(num_frames):
            self._posted.popleft()

    async def _put(self, data: bytes) -> None:
        """Write to the stream. If it is broken, drop the data: earlier messages of the other end must still be read."""
        if self._is_broken:
            await trio.lowlevel.checkpoint()
            return
        try:
            self._write_began_at = trio.current_time()
            await self._stream.send_all(data)
            self.bytes_sent += len(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            logger.debug("writing to the stream broke off: %s", error)
            self._is_broken = True
        finally:
            self._write_began_at = math.inf

    async def _watch_writes(self) -> None:
        """Raise `trio.TooSlowError` when a write takes too long: a scope around each would cost a twelfth of it."""
        await self._until(lambda: self._patience is not None)
        assert self._patience is not None
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
            if not isinstance(source, Whole) or CHUNK_OVERHEAD_BYTES + size > room or not self._shaping.up.has(size):
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

    async def _move(self, on_received: Callable[[int], None]) -> None:
        await self._until(lambda: self._patience is not None)
        if self.pipe.is_large:
            await self._agree(on_received)
        while (channel := self._transport.channel) is not None:
            if self._max_unsent is not None:
                channel.limit_unsent(self._max_unsent)
            await self._move_over(channel, on_received)
            self._transport.discard()
            await self._agree(on_received)
        await self._send_over_stream()

    async def _agree(self, on_received: Callable[[int], None]) -> None:
        """Agree on the next route; nothing moves during this time."""
        pipe, patience = self.pipe, self._patience
        assert patience is not None, "transfers may move"
        if pipe.is_opener:
            is_last = pipe.num_routes == MAX_ROUTES - 1
            name = None if is_last else await self._transport.open(trio.current_time() + patience.route)
            self._settle_whole(on_received)
            self._send(Route(name, pipe.num_received))
            with trio.fail_after(patience.answer):
                await self._until(lambda: pipe.step in (RouteStep.CHANNEL, RouteStep.STREAM))
            if pipe.channel is None:
                self._transport.discard()  # the answerer does not have it
        else:
            with trio.fail_after(patience.route + patience.answer):
                await self._until(lambda: pipe.step in (RouteStep.PROPOSED, RouteStep.REPLACING))
            self._settle_whole(on_received)
            self._send(Route(self._transport.take(pipe.proposed), pipe.num_received))

    def _send(self, message: Route | Reroute | Sealed | Received) -> None:
        self.post(self.pipe.send(message))

    async def _move_over(self, channel: Channel, on_received: Callable[[int], None]) -> None:
        """Move over a channel until another route is needed. Then no thread is active any more."""
        self._is_stuck = False
        async with open_service_nursery() as nursery:
            nursery.start_soon(self._send_over, channel)
            nursery.start_soon(self._receive_over, channel, on_received)
            await self._until(self._needs_route)

    def _needs_route(self) -> bool:
        if not self.pipe.is_opener:
            return self.pipe.step is RouteStep.REPLACING
        return self._is_stuck or self.pipe.step is RouteStep.LOST

    # Receiving over a channel

    async def _receive_over(self, channel: Channel, on_received: Callable[[int], None]) -> None:
        flow = self.pipe.incoming
        while True:
            await self._until(lambda: flow.is_open)
            head = flow.open[0]
            assert head.incoming is not None, "what comes has a place"
            await self._fill(channel, head.incoming)
            if head.incoming.position < head.size:
                break
            await self._until(lambda: flow.is_head_sealed)
            self._settle_whole(on_received)
        self._is_stuck = True
        if not self.pipe.is_opener and self.pipe.step is RouteStep.CHANNEL:
            self._send(Reroute())
        self._notify()

    async def _fill(self, channel: Channel, incoming: Incoming) -> None:
        """Receive to the end, or until the channel breaks or is silent."""
        before = incoming.position
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._cancel_when_silent, channel, nursery.cancel_scope)
                try:
                    await channel.receive(incoming)
                except ChannelError as error:
                    logger.debug("receiving over the bulk channel broke off: %s", error)
                nursery.cancel_scope.cancel()
        finally:
            self.bytes_received += incoming.position - before

    async def _cancel_when_silent(self, channel: Channel, scope: trio.CancelScope) -> None:
        """Cancel when no bytes come at all: on a slow line, a whole record takes seconds."""
        assert self._patience is not None, "transfers may move"
        patience = self._patience.silent
        before, heard_at = channel.num_received, trio.current_time()
        while True:
            await trio.sleep(patience / SILENT_CHECKS)
            now = trio.current_time()
            if channel.num_received > before:
                before, heard_at = channel.num_received, now
            elif now >= heard_at + patience:
                return scope.cancel()

    def _settle_whole(self, on_received: Callable[[int], None]) -> None:
        """Compare the hash of a transfer, and report it, if all of it has come over the channel.

        Call it only when no thread receives any more, since the thread would hash at the same time.
        """
        pipe = self.pipe
        head = pipe.incoming.open[0] if pipe.incoming.open else None
        if head is None or head.incoming is None or head.incoming.position < head.size:
            return
        pipe.check_whole()
        self._send(Received())
        on_received(head.name)
        self._notify()

    # Sending

    async def _seal_all(self) -> None:
        """Send the hash of each source of a hashed pipe when it is ready."""
        if not self.pipe.is_hashed:
            return
        while True:
            await self._until(lambda: self.pipe.outgoing.awaits_hash and bool(self._sources))
            unsealed = next(transfer.end for transfer in self.pipe.outgoing.open if transfer.digest is None)
            source = next(source for end, source in self._sources if end == unsealed)
            self._send(Sealed(await source.wait_whole()))

    async def _next_piece(self, most: Callable[[], int]) -> memoryview:
        """Return the next bytes to send, at most ``most()``; the hash is sent before the last piece of a transfer."""
        flow = self.pipe.outgoing
        await self._until(lambda: self.pipe.num_sent < flow.end)
        source, position = self._next_source()
        num_ready = await source.wait_beyond(position)
        if num_ready == source.memory.nbytes and self.pipe.is_hashed:
            await self._until(lambda: flow.is_head_sealed)
        return source.memory[position : min(num_ready, position + most())]

    def _next_source(self) -> tuple[Source, int]:
        """Return the source of the next byte to send, and the byte's position in it; forget those that have arrived."""
        while self._sources[0][0] <= self.pipe.outgoing.settled:
            self._sources.popleft()
        end, source = next(entry for entry in self._sources if entry[0] > self.pipe.num_sent)
        return source, self.pipe.num_sent - (end - source.memory.nbytes)

    def _channel_bytes(self) -> int:
        return UNLIMITED_BYTES if self._pacing is None else self._pacing.piece_bytes()

    def _chunk_bytes(self) -> int:
        """Return the most bytes of a chunk that, with all posted frames before it, fits in one Noise message."""
        room = max(CHUNK_BYTES - sum(map(len, self._posted)), CHUNK_BYTES // 2)
        return min(room, self._shaping.up.quantum)

    async def _rest(self, num_bytes: int, began_at: float) -> None:
        if self._pacing is not None:
            await self._pacing.rest(num_bytes, trio.current_time() - began_at)

    async def _send_over(self, channel: Channel) -> None:
        assert self._patience is not None, "transfers may move"
        before = channel.num_sent
        try:
            while True:
                piece = await self._next_piece(self._channel_bytes)
                began_at, end, self._is_sending = trio.current_time(), self.pipe.num_sent + piece.nbytes, True
                await channel.send(piece)
                if self.pipe.step is not RouteStep.REPLACING:  # else the other end has said where to continue
                    self.pipe.num_sent = max(self.pipe.num_sent, end)  # it may have reported all of it already
                self._is_sending = False
                self._notify()
                await self._rest(piece.nbytes, began_at)
        except ChannelError as error:
            logger.debug("sending over the bulk channel broke off: %s", error)  # the other end says what it lacks
        finally:
            self._is_sending = False
            self.bytes_sent += channel.num_sent - before
        await self._until(lambda: self.pipe.outgoing.is_open)
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
            await self._rest(piece.nbytes, began_at)

    # Waiting

    def _notify(self) -> None:
        """Wake those tasks whose condition holds now."""
        for event, holds in self._waiting.items():
            if holds():
                event.set()

    async def _until_or_over(self, holds: Callable[[], bool]) -> None:
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
