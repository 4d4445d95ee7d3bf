"""One stream to a node of a neighbouring stage: a task that reads, and two that write control messages and data.

Control messages do not wait behind data. Small data go over the stream, in chunks; large ones, where there is a way,
over a bulk channel, by threads, straight from and to the memory that the trainer shares. All keeps to the node's caps.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import trio

from farandole.protocol.activations import (
    DATA_BYTES,
    Control,
    DataReceived,
    Dropped,
    Event,
    Forward,
    Gradient,
    Link,
    Settled,
    Way,
)
from farandole.protocol.errors import RemoteProtocolError
from farandole.protocol.incoming import Incoming
from farandole.protocol.pipe import BULK_FROM

from ...base.bandwidth import Shaping
from ...base.streams import READ_BYTES, Stream, close_stream
from ...bulk.channel import BulkChannel, ChannelError
from ...bulk.transport import Channels

logger = logging.getLogger(__name__)

# One write, of a chunk or some control messages: on the slowest line a chunk takes a second.
WRITE_TIMEOUT = 30.0
# Data that were announced hold a slot, so they must come: a chunk, or all that is missing, in so many seconds; those do
# not count in which this node's own cap held them up. On the slowest line a chunk takes a second; then ten flows may
# share it, and what comes no faster, a megabyte in three minutes, is of no use to a run. A line that loses packets is
# silent for a second or two. Looked at so often, who falls silent is noticed within two such times.
PROGRESS_TIMEOUT = 10.0
PROGRESS_BYTES = DATA_BYTES


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A message whose data follow it; or a `Settled`, which must not overtake its `Forward`."""

    message: Forward | Gradient | Settled
    data: memoryview | None


@dataclass(frozen=True, slots=True)
class _Progress:
    """How far data that were announced have come."""

    index: int
    """The microbatch's."""
    num_come: int
    """Bytes, from any start."""
    seconds_held_up: float
    """By this node's own cap, from any start."""

    def is_enough(self, before: _Progress) -> bool:
        """Since ``before``, `PROGRESS_TIMEOUT` ago."""
        seconds = PROGRESS_TIMEOUT - (self.seconds_held_up - before.seconds_held_up)
        return self.num_come - before.num_come >= PROGRESS_BYTES * seconds / PROGRESS_TIMEOUT


class ActivationLink:
    """Carries a `Link`. ``on_event`` is called with each event; after those that begin data it calls ``link.place``.

    ``channels``: ways beside the stream, for data of `BULK_FROM` bytes or more.
    """

    def __init__(
        self, number: int, link: Link, stream: Stream, shaping: Shaping, channels: Channels[BulkChannel] | None = None
    ) -> None:
        self.number = number
        self.link = link
        self.bytes_sent = 0
        self.bytes_received = 0
        self._stream = stream
        self._shaping = shaping
        self._channels = channels if link.size >= BULK_FROM else None
        self._channel: BulkChannel | None = None
        self._landing = bytearray()
        self._seconds_held_up = 0.0  # in which this node's cap made what came over the stream wait
        self._scope = trio.CancelScope()
        self._controls: deque[Control] = deque()
        self._transfers: deque[_Transfer] = deque()
        self._wakeup, self._data_wakeup = trio.Event(), trio.Event()
        self._write_lock = trio.Lock()
        stream.is_bulk = True

    @property
    def peer(self) -> bytes:
        """Its public key."""
        return self._stream.peer

    def close(self) -> None:
        """End it soon."""
        self._scope.cancel()

    def send(self, message: Control, data: memoryview | None = None) -> None:
        """Send it when it is its turn; ``data`` are read then."""
        if isinstance(message, Forward | Gradient) or (isinstance(message, Settled) and self._transfers):
            self._transfers.append(_Transfer(message, data))
            self._data_wakeup.set()
        else:
            self._controls.append(message)
            self._wakeup.set()

    async def greet(self, on_event: Callable[[Event], None]) -> None:
        """Read until both have greeted; for before `run`, which hears what came with the greeting.

        Closes the stream if it comes to nothing.
        """
        try:
            await self._write_waiting()
            while not self.link.is_open:
                data = await self._stream.receive_some(READ_BYTES)
                if not data:
                    raise RemoteProtocolError("the stream ended before its greeting")
                self.link.receive_data(data)
                while not self.link.is_open and (event := self.link.next_event()) is not None:
                    on_event(event)
                await self._write_waiting()
        finally:
            if not self.link.is_open:
                await close_stream(self._stream)

    async def run(self, on_event: Callable[[ActivationLink, Event], None]) -> None:
        """Until the stream or its channel breaks, the peer breaks the protocol or stops in the middle of data, or
        `close`; closes both.
        """
        expecting = self._channels.expecting(self.peer) if self._channels else contextlib.nullcontext()
        try:
            with self._scope, expecting:
                async with trio.open_nursery() as nursery:
                    for task in (self._write_controls, self._write_data, self._seek_channel, self._watch_progress):
                        nursery.start_soon(self._until_broken, task)
                    await self._until_broken(partial(self._read, on_event))
        finally:
            if self._channel is not None and self._channels is not None:
                self._channels.discard(self._channel)
            await close_stream(self._stream)

    async def _until_broken(self, task: Callable[[], Awaitable[None]]) -> None:
        try:
            await task()
        except (
            trio.BrokenResourceError,
            trio.ClosedResourceError,
            trio.TooSlowError,
            ChannelError,
            RemoteProtocolError,
        ) as error:
            logger.debug("a link ends: %r", error)
            self.close()

    # The channel

    async def _seek_channel(self) -> None:
        if self._channels is None or not self.link.is_upstream:
            return
        self._channel = await self._channels.acquire(self.peer)
        if self._channel is not None:
            self.send(Way(self._channel.session))

    def _answer_way(self, way: Way) -> None:
        """The upstream node has named a channel; or the downstream one has it too."""
        if self.link.is_upstream or self._channels is None:
            return
        self._channel = self._channels.take(self.peer, way.channel)
        if self._channel is not None:
            self.send(way)

    # Reading

    async def _read(self, on_event: Callable[[ActivationLink, Event], None]) -> None:
        while True:
            while (event := self.link.next_event()) is not None:
                if isinstance(event, Way):
                    self._answer_way(event)
                else:
                    on_event(self, event)
                if self.link.awaits_bulk and (received := await self._receive_bulk()) is not None:
                    on_event(self, received)
            data = await self._stream.receive_some(min(READ_BYTES, self._shaping.down.quantum))
            if not data:
                return self.close()
            self.bytes_received += len(data)
            self._seconds_held_up += await self._shaping.down.wait(len(data))
            self.link.receive_data(data)

    async def _watch_progress(self) -> None:
        """Raises `trio.TooSlowError` when announced data come no further, or too slowly to be of use."""
        while True:
            before = self._progress()
            await trio.sleep(PROGRESS_TIMEOUT)
            now = self._progress()
            if before and now and before.index == now.index and not now.is_enough(before):
                raise trio.TooSlowError(f"the data of microbatch {now.index} do not come")

    def _progress(self) -> _Progress | None:
        """Of what is awaited; over the stream frames count, over the channel bytes: others are not read meanwhile."""
        if self.link.awaited is None:
            return None
        index, num_missing = self.link.awaited
        channel = self._channel
        num_over_channel, seconds = (channel.num_received, channel.seconds_held_up) if channel else (0, 0.0)
        return _Progress(index, num_over_channel - num_missing, seconds + self._seconds_held_up)

    async def _receive_bulk(self) -> DataReceived | None:
        """Not straight to its place: that may become another microbatch's while a thread still writes."""
        assert self._channel is not None, "data come over a channel that both have named"
        self._landing = self._landing or bytearray(self.link.size)
        await self._channel.receive(Incoming(memoryview(self._landing)))
        self.bytes_received += self.link.size
        if self.link.bulk_memory is not None:
            self.link.bulk_memory[:] = self._landing
        return self.link.bulk_received()

    # Writing

    async def _write_controls(self) -> None:
        while True:
            wakeup = self._wakeup = trio.Event()
            await self._write_waiting()
            await wakeup.wait()

    async def _write_waiting(self, following: Callable[[], bytes] = bytes) -> None:
        """Control messages that wait, and what follows them: a drop must not come after the rest of its gradient."""
        async with self._write_lock:
            waiting, self._controls = self._controls, deque()
            frames = b"".join(self.link.send(message) for message in waiting if self._means_something(message))
            self._shaping.up.charge(len(frames))
            frames += following()
            if frames:
                await self._send(frames)

    def _means_something(self, message: Control) -> bool:
        """Whether the microbatch that it is about has not ended since."""
        match message:
            case Dropped(index):
                return self.link.may_drop(index)
            case Settled(index) | Gradient(index):
                return index in self.link.open
            case _:
                return True

    async def _write_data(self) -> None:
        while True:
            wakeup = self._data_wakeup = trio.Event()
            while self._transfers:
                await self._transfer(self._transfers.popleft())
            await wakeup.wait()

    async def _transfer(self, transfer: _Transfer) -> None:
        message, data = transfer.message, transfer.data
        channel = self._channel if self.link.channel is not None else None
        if channel is not None and not isinstance(message, Settled):
            message = msgspec.structs.replace(message, is_bulk=True)
        async with self._write_lock:
            if not self._means_something(message):
                return
            await self._send(self.link.send(message))
        if data is not None and channel is not None:
            # A gradient cannot be taken back once a thread sends it: its slot may become another microbatch's, its
            # bytes may not. A microbatch that goes forward meanwhile is dropped at the end, whatever it brings.
            await channel.send(memoryview(bytes(data)) if isinstance(message, Gradient) else data)
            self.bytes_sent += len(data)
            self.link.bulk_sent()
        elif data is not None:
            for offset in range(0, len(data), DATA_BYTES):
                chunk = data[offset : offset + DATA_BYTES]
                await self._shaping.up.wait(len(chunk))
                await self._write_waiting(partial(self.link.send_data, chunk))

    async def _send(self, data: bytes) -> None:
        with trio.fail_after(WRITE_TIMEOUT):
            await self._stream.send_all(data)
        self.bytes_sent += len(data)
