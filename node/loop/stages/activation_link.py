"""One stream to a node of a neighbouring stage: a pipe (`farandole.node.bulk.pipe`) of microbatches.

Control messages do not wait behind data. Small data go over the stream, in chunks. Large data go over a bulk channel,
if one opens, and over the next route when that breaks. All data keep to the node's bandwidth caps.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from farandole.protocol.stages.activations import (
    DATA_BYTES,
    Control,
    Dropped,
    Event,
    Forward,
    Gradient,
    Hello,
    Link,
    Settled,
    Welcome,
)
from farandole.protocol.wire.errors import RemoteProtocolError

from ...base.bandwidth import Shaping
from ...base.streams import READ_BYTES, Stream, close_stream
from ...bulk.pipe import BulkPipe, Patience, Whole
from ...bulk.transport import Channels, Transport

logger = logging.getLogger(__name__)

# A channel opens within round trips. One write is a chunk or a control message: on the slowest line a chunk takes a
# second.
PATIENCE = Patience(route=6.0, answer=10.0, write=30.0)
# Announced data hold a slot, so they must arrive: a chunk, or all that is missing, in this many seconds. Seconds in
# which this node's own cap held them up do not count. On the slowest line a chunk takes a second; then ten flows may
# share it, and a slower rate, a megabyte in three minutes, is of no use to a run. A line that loses packets is silent
# for a second or two. Progress is checked at this interval, so a peer that falls silent is noticed within two
# intervals.
PROGRESS_TIMEOUT = 10.0
PROGRESS_BYTES = DATA_BYTES


@dataclass(frozen=True, slots=True)
class _Progress:
    """The progress of data that were announced."""

    index: int
    """The microbatch's index."""
    num_routes: int
    num_come: int
    """The bytes that arrived over this route, from any start."""
    seconds_held_up: float
    """The seconds of delay by this node's own cap, from any start."""

    def is_enough(self, before: _Progress) -> bool:
        """Return whether there is enough progress since ``before``, `PROGRESS_TIMEOUT` ago."""
        seconds = PROGRESS_TIMEOUT - (self.seconds_held_up - before.seconds_held_up)
        return bool(self.num_come - before.num_come >= PROGRESS_BYTES * seconds / PROGRESS_TIMEOUT)


class ActivationLink:
    """Carries a `Link`. ``on_event`` is called with each event, and if that begins data, it calls ``link.place``.

    ``channels``: bulk channels in addition to the stream, for data of `BULK_FROM` bytes or more.
    """

    def __init__(
        self, number: int, link: Link, stream: Stream, shaping: Shaping, channels: Channels[Any] | None = None
    ) -> None:
        self.number = number
        self.link = link
        self._stream = stream
        self._transport = Transport(stream.peer, channels)
        self._bulk = BulkPipe(link.pipe, stream, self._transport, shaping)
        self._scope = trio.CancelScope()
        self._greeting = b""  # of this node, to be written
        # Messages whose data follow them; and each `Settled`, which must not overtake its `Forward`.
        self._transfers: deque[tuple[Control, memoryview | None]] = deque()
        self._wakeup = trio.Event()
        self._is_posted = False  # something, since the last `flush`

    @property
    def peer(self) -> bytes:
        """Return the peer's public key."""
        return self._stream.peer

    @property
    def bytes_sent(self) -> int:
        """Return the bytes sent over stream and channel."""
        return self._bulk.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Return the bytes received over stream and channel."""
        return self._bulk.bytes_received

    def close(self) -> None:
        """Cancel `run`, which ends soon after."""
        self._scope.cancel()

    def send(self, message: Control, data: memoryview | None = None) -> None:
        """Queue a message, for `flush`; ``data`` are read when its turn comes."""
        if isinstance(message, Hello | Welcome):
            self._greeting += self.link.send(message)
        elif isinstance(message, Forward | Gradient) or (isinstance(message, Settled) and self._transfers):
            self._transfers.append((message, data))
            if len(self._transfers) == 1 and self.link.pipe.can_offer:
                self._send_next()
            else:
                self._wakeup.set()
        elif self._means_something(message):
            self._post(message)

    def flush(self) -> None:
        """Send what is queued, in as few Noise messages as possible."""
        if self._is_posted:
            self._is_posted = False
            self._bulk.flush()

    async def greet(self, on_event: Callable[[Event], None]) -> None:
        """Read until both have greeted; call it before `run`, which handles what came with the greeting.

        Closes the stream if the greeting fails.
        """
        try:
            await self._write_greeting()
            while not self.link.is_open:
                data = await self._stream.receive_some(READ_BYTES)
                if not data:
                    raise RemoteProtocolError("the stream ended before its greeting")
                self.link.receive_data(data)
                while not self.link.is_open and (event := self.link.next_event()) is not None:
                    on_event(event)
                await self._write_greeting()
        finally:
            if not self.link.is_open:
                await close_stream(self._stream)

    async def _write_greeting(self) -> None:
        greeting, self._greeting = self._greeting, b""
        if greeting:
            with trio.fail_after(PATIENCE.write):
                await self._stream.send_all(greeting)

    async def run(
        self, on_event: Callable[[ActivationLink, Event], None], on_routed: Callable[[], None] = lambda: None
    ) -> None:
        """Run until the stream breaks, the peer breaks the protocol or stops in the middle of data, or `close`.

        ``on_routed`` is called once both ends know which route data take. Closes the stream and its channel.
        """
        try:
            with self._scope, self._transport.expecting():
                async with trio.open_nursery() as nursery:
                    for task in (self._write_data, self._watch_progress, partial(self._await_route, on_routed)):
                        nursery.start_soon(self._until_broken, task)
                    await self._until_broken(partial(self._read, on_event))
        finally:
            self._bulk.close(is_clean=False)
            await close_stream(self._stream)

    async def _until_broken(self, task: Callable[[], Awaitable[None]]) -> None:
        try:
            await task()
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError, RemoteProtocolError) as error:
            logger.debug("a link ends: %r", error)
            self.close()

    async def _await_route(self, on_routed: Callable[[], None]) -> None:
        await self._bulk.wait_routed()
        on_routed()

    # Reading

    async def _read(self, on_event: Callable[[ActivationLink, Event], None]) -> None:
        async def hear(payload: bytes) -> None:
            if (event := self.link.hear(payload)) is not None:
                on_event(self, event)

        def receive(index: int) -> None:
            if (event := self.link.receive(index)) is not None:
                on_event(self, event)

        self._bulk.begin(PATIENCE)
        await self._bulk.run(hear, receive)
        self.close()

    async def _watch_progress(self) -> None:
        """Raise `trio.TooSlowError` when announced data stop, or arrive too slowly to be of use."""
        while True:
            before = self._progress()
            await trio.sleep(PROGRESS_TIMEOUT)
            now = self._progress()
            is_same = before and now and (before.index, before.num_routes) == (now.index, now.num_routes)
            if before and now and is_same and not now.is_enough(before):
                raise trio.TooSlowError(f"the data of microbatch {now.index} do not come")

    def _progress(self) -> _Progress | None:
        """Return the progress of awaited data: on the stream data count; on the channel all bytes, sealed in pieces."""
        if self.link.awaited is None:
            return None
        pipe, channel = self.link.pipe, self._transport.channel
        num_come = pipe.num_received if channel is None else channel.num_received
        return _Progress(self.link.awaited, pipe.num_routes, num_come, self._bulk.seconds_capped)

    # Writing

    def _means_something(self, message: Control) -> bool:
        """Return whether the microbatch of the message is still under way."""
        match message:
            case Dropped(index):
                return self.link.may_drop(index)
            case Settled(index) | Gradient(index):
                return index in self.link.open
            case _:
                return True

    async def _write_data(self) -> None:
        """Send what could not be sent at once."""
        while True:
            wakeup = self._wakeup = trio.Event()
            while self._transfers:
                if self._transfers[0][1] is not None:
                    await self._bulk.wait_offerable()
                self._send_next()
                self.flush()
            await wakeup.wait()

    def _send_next(self) -> None:
        message, data = self._transfers.popleft()
        if not self._means_something(message):
            return
        self._post(message)
        if data is not None:
            # A gradient cannot be taken back once a thread sends it: its slot may become another microbatch's, its
            # bytes must not. A microbatch that goes forward in that time is dropped at the end, whatever its bytes are.
            is_copied = isinstance(message, Gradient) and self.link.pipe.channel is not None
            self._bulk.add(Whole(memoryview(bytes(data)) if is_copied else data), is_held=True)

    def _post(self, message: Control) -> None:
        self._bulk.post(self.link.send(message), is_held=True)
        self._is_posted = True
