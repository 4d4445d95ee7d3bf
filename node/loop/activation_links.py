"""The links of a node that holds a stage: it opens some, neighbours open others, and all end with the trainer.

A link is one stream to a node of a neighbouring stage: a pipe (`farandole.node.bulk.pipe`) of microbatches. Control
messages do not wait behind data. Small data go over the stream, in chunks. Large data go over a bulk channel, if one
opens, and over the next route when that breaks. All data keep to the node's bandwidth caps.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec
import trio

from farandole.protocol.run.manifest import Manifest
from farandole.protocol.stages.activations import (
    DATA_BYTES,
    Control,
    Event,
    Forward,
    Gradient,
    Hello,
    Link,
    Settled,
    Welcome,
    shape_hash,
)
from farandole.protocol.stages.pipeline_events import (
    LinkClosed,
    LinkFailed,
    LinkOpened,
    Measured,
    Received,
    RoundDrained,
)
from farandole.protocol.trainer.trainer_messages import Command
from farandole.protocol.wire.errors import RemoteProtocolError

from ..base.bandwidth import Shaping
from ..base.errors import PeerUnreachableError
from ..base.streams import READ_BYTES, Stream, StreamHost
from ..bulk.negotiation import BulkService
from ..bulk.pipe import BulkPipe, Outgoing, Patience

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


@dataclass(frozen=True, slots=True, eq=False)
class Worker:
    """One trainer process; ``size``: bytes of one microbatch's activations, and of their gradient."""

    stage: int
    size: int
    memory: memoryview
    """Shared with the trainer: for each slot, ``size`` bytes that came in, then ``size`` bytes that go out."""
    send: Callable[[Command], None]
    report: Callable[[RoundDrained | Measured], None]

    def incoming(self, slot: int) -> memoryview:
        """Return the memory for the data that a slot receives."""
        return self.memory[2 * slot * self.size : (2 * slot + 1) * self.size]

    def outgoing(self, slot: int) -> memoryview:
        """Return the memory of the data that a slot sends."""
        return self.memory[(2 * slot + 1) * self.size : (2 * slot + 2) * self.size]


class ActivationLink:
    """Carries a `Link`. ``on_event`` is called with each event, and copies received data (`Link.landed`) at once.

    ``channels``: bulk channels in addition to the stream, for data of `BULK_FROM` bytes or more.
    """

    def __init__(
        self, number: int, link: Link, stream: Stream, shaping: Shaping, channels: BulkService | None = None
    ) -> None:
        self.number = number
        self.link = link
        self._stream = stream
        self._channels = channels
        self.bulk = BulkPipe(link.pipe, stream, channels, shaping)
        self._scope = trio.CancelScope()
        self._greeting = b""  # of this node, to be written
        # Messages whose data follow them; and each `Settled`, which must not overtake its `Forward`.
        self._transfers: deque[tuple[Control, memoryview | None]] = deque()
        self._wakeup = trio.Event()
        self._is_posted = False  # something, since the last `flush`

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
        elif self.link.means_something(message):
            self._post(message)

    def flush(self) -> None:
        """Send what is queued, in as few Noise messages as possible."""
        if self._is_posted:
            self._is_posted = False
            self.bulk.flush()

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
                await self._stream.aclose()

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
            with self._scope, self._channels.expecting(self._stream.peer) if self._channels else nullcontext():
                async with trio.open_nursery() as nursery:

                    async def await_route() -> None:
                        await self.bulk.wait_routed()
                        on_routed()

                    for task in (self._write_data, self._watch_progress, await_route):
                        nursery.start_soon(self._until_broken, task)
                    await self._until_broken(partial(self._read, on_event))
        finally:
            self.bulk.close(is_clean=False)
            await self._stream.aclose()

    async def _until_broken(self, task: Callable[[], Awaitable[None]]) -> None:
        try:
            await task()
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError, RemoteProtocolError) as error:
            logger.debug("a link ends: %r", error)
            self.close()

    # Reading

    async def _read(self, on_event: Callable[[ActivationLink, Event], None]) -> None:
        async def hear(payload: bytes) -> None:
            if (event := self.link.hear(payload)) is not None:
                on_event(self, event)

        def receive(index: int) -> None:
            if (event := self.link.receive(index)) is not None:
                on_event(self, event)

        self.bulk.begin(PATIENCE)
        await self.bulk.run(hear, receive)
        self.close()

    async def _watch_progress(self) -> None:
        """Raise `trio.TooSlowError` when announced data stop, or arrive too slowly to be of use."""
        while True:
            awaited, num_before, held_before = self._progress()
            await trio.sleep(PROGRESS_TIMEOUT)
            still_awaited, num_come, held_up = self._progress()
            least = PROGRESS_BYTES * (PROGRESS_TIMEOUT - (held_up - held_before)) / PROGRESS_TIMEOUT
            if awaited[0] is not None and awaited == still_awaited and num_come - num_before < least:
                raise trio.TooSlowError(f"the data of microbatch {awaited[0]} do not come")

    def _progress(self) -> tuple[tuple[int | None, int], int, float]:
        """Return the awaited microbatch and the number of routes, the bytes that came, and the delay by the own cap.

        On the stream data count; on the channel all bytes, which are sealed in pieces.
        """
        pipe, channel = self.link.pipe, self.bulk.channel
        num_come = pipe.num_received if channel is None else channel.num_received
        return (self.link.awaited, pipe.num_routes), num_come, self.bulk.seconds_capped

    # Writing

    async def _write_data(self) -> None:
        """Send what could not be sent at once."""
        while True:
            wakeup = self._wakeup = trio.Event()
            while self._transfers:
                if self._transfers[0][1] is not None:
                    await self.bulk.wait_offerable()
                self._send_next()
                self.flush()
            await wakeup.wait()

    def _send_next(self) -> None:
        message, data = self._transfers.popleft()
        if not self.link.means_something(message):
            return
        self._post(message)
        if data is not None:
            # A gradient cannot be taken back once a thread sends it: its slot may become another microbatch's, its
            # bytes must not. A microbatch that goes forward in that time is dropped at the end, whatever its bytes are.
            is_copied = isinstance(message, Gradient) and self.link.pipe.channel is not None
            self.bulk.add(Outgoing(memoryview(bytes(data)) if is_copied else data), is_held=True)

    def _post(self, message: Control) -> None:
        self.bulk.post(self.link.send(message), is_held=True)
        self._is_posted = True


ACTIVATIONS_PROTOCOL: Final = "/farandole/activations/1"
# This includes the dial.
GREETING_TIMEOUT: Final = 10.0


Handle = Callable[[LinkOpened | LinkFailed | LinkClosed | Received], None]
"""Handles the events of links, and what arrives over them."""


class Links:
    """The links of one node.

    Without ``channels`` everything goes over the streams.
    """

    def __init__(
        self,
        host: StreamHost,
        manifest: Manifest,
        run_id: bytes,
        shaping: Shaping,
        channels: BulkService | None = None,
    ) -> None:
        self.nodes: Sequence[frozenset[bytes]] = [frozenset()] * manifest.model.num_stages
        """The live nodes of each stage."""
        self.by_number: dict[int, ActivationLink] = {}
        self._host = host
        self._channels = channels
        self._hello = Hello(run_id, 0, shape_hash(manifest))
        self._shaping = shaping
        self._handle: Handle = lambda event: None
        self._worker: Worker | None = None
        self._numbers = itertools.count()
        self._bytes_sent = self._bytes_received = 0  # over links that have ended
        host.set_handler(ACTIVATIONS_PROTOCOL, self._serve)

    def begin(self, worker: Worker, handle: Handle) -> None:
        """Open and serve links from now on."""
        self._worker, self._handle = worker, handle

    def end(self) -> None:
        """Close all links."""
        self._worker = None
        for link in self.by_number.values():
            link.close()

    def flush(self) -> None:
        """Send what was queued on links."""
        for link in self.by_number.values():
            link.flush()

    @property
    def bytes_sent(self) -> int:
        """Return the bytes sent over all links since the node began."""
        return self._bytes_sent + sum(link.bulk.bytes_sent for link in self.by_number.values())

    @property
    def bytes_received(self) -> int:
        """Return the bytes received over all links since the node began."""
        return self._bytes_received + sum(link.bulk.bytes_received for link in self.by_number.values())

    async def open(self, peer: bytes, is_return: bool) -> None:
        """Open a link to a node of the next stage, or (``is_return``) to an origin, and run it to its end."""
        worker = self._worker
        if worker is None:
            return
        hello = msgspec.structs.replace(self._hello, stage=0 if is_return else worker.stage + 1)
        try:
            with trio.fail_after(GREETING_TIMEOUT):
                stream = await self._host.open_stream(peer, ACTIVATIONS_PROTOCOL, GREETING_TIMEOUT)
                link = self._link(stream, Link(True, hello, worker.size))
                link.send(hello)
                await link.greet(lambda event: None)
        except (PeerUnreachableError, RemoteProtocolError, trio.BrokenResourceError, trio.TooSlowError):
            if self._worker is worker:
                self._handle(LinkFailed(peer, is_return))
            return
        await self._run(link, LinkOpened(link.number, peer, is_upstream=True, is_return=is_return), worker)

    async def _serve(self, stream: Stream) -> None:
        """Serve a link from the stage before, or from the last stage, which returns what was drawn here."""
        worker = self._worker
        if worker is None or stream.peer not in self.nodes[worker.stage - 1]:
            await stream.aclose()
            return
        hello = msgspec.structs.replace(self._hello, stage=worker.stage)
        link = self._link(stream, Link(False, hello, worker.size))

        def welcome(event: Event) -> None:
            if isinstance(event, Hello):
                link.send(Welcome(0))

        try:
            with trio.fail_after(GREETING_TIMEOUT):
                await link.greet(welcome)
        except (RemoteProtocolError, trio.BrokenResourceError, trio.TooSlowError):
            return
        is_return = worker.stage == 0
        await self._run(link, LinkOpened(link.number, stream.peer, is_upstream=False, is_return=is_return), worker)

    def _link(self, stream: Stream, link: Link) -> ActivationLink:
        return ActivationLink(next(self._numbers), link, stream, self._shaping, self._channels)

    async def _run(self, link: ActivationLink, opened: LinkOpened, worker: Worker) -> None:
        if self._worker is not worker:  # it has been replaced in the meantime
            link.close()
        else:
            self.by_number[link.number] = link
            if opened.is_upstream:
                self._handle(opened)

        def hear(link: ActivationLink, event: Event) -> None:
            self._handle(Received(link.number, event))

        def on_routed() -> None:
            # A channel takes seconds to open, or to fail. Until then the downstream node gives the link no credits, so
            # that microbatches take other links.
            if not opened.is_upstream and self._worker is worker:
                self._handle(opened)

        try:
            await link.run(hear, on_routed)
        finally:
            self.by_number.pop(link.number, None)
            self._bytes_sent += link.bulk.bytes_sent
            self._bytes_received += link.bulk.bytes_received
            self._handle(LinkClosed(link.number))
