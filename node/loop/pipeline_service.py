"""Microbatches in and out of a node that holds a stage: carries out what `farandole.protocol.stages.pipeline` decides.

Activations come from neighbours straight into memory that the trainer shares, and are sent from there. The machine
lives as long as its trainer: without one there are no links.

A link is one stream to a node of a neighbouring stage: a pipe (`farandole.node.bulk.pipe`) of microbatches. Control
messages do not wait behind data. Small data go over the stream, in chunks. Large data go over a bulk channel, if one
opens, and over the next route when that breaks. All data keep to the node's bandwidth caps.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import InitVar, dataclass
from typing import Final

import msgspec
import trio

from farandole.protocol.run.manifest import Manifest
from farandole.protocol.stages import activations as wire
from farandole.protocol.stages import pipeline_events as machine
from farandole.protocol.stages.microbatches import Avoidance, Counts
from farandole.protocol.stages.pipeline import Pipeline
from farandole.protocol.trainer import trainer_messages as messages
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.identity import short_name
from farandole.protocol.wire.messagepack import encode
from farandole.protocol.wire.timers import SetTimer, TimerFired

from ..base.bandwidth import Shaping
from ..base.driver import Driver
from ..base.errors import PeerUnreachableError
from ..base.streams import READ_BYTES, Stream
from ..base.system.sockets import TaskStatus
from ..bulk.negotiation import BulkService
from ..bulk.pipe import BulkPipe, Outgoing, Patience
from ..mesh.host import Host
from ..state.messenger import Messenger
from ..status.status import PipelineStatus

logger = logging.getLogger(__name__)

MICROBATCH_PROTOCOL: Final = "/farandole/microbatch/1"
ACTIVATIONS_PROTOCOL: Final = "/farandole/activations/1"
# This includes the dial.
GREETING_TIMEOUT: Final = 10.0
# A channel opens within round trips. One write is a chunk or a control message: on the slowest line a chunk takes a
# second.
PATIENCE = Patience(route=6.0, answer=10.0, write=30.0)
# Announced data hold a slot, so they must arrive: a chunk, or all that is missing, in this many seconds. Seconds in
# which this node's own cap held them up do not count. On the slowest line a chunk takes a second; then ten flows may
# share it, and a slower rate, a megabyte in three minutes, is of no use to a run. A line that loses packets is silent
# for a second or two. Progress is checked at this interval, so a peer that falls silent is noticed within two
# intervals.
PROGRESS_TIMEOUT = 10.0
PROGRESS_BYTES = wire.DATA_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class Worker:
    """One trainer process; ``size``: bytes of one microbatch's activations, or of their gradient if that is larger."""

    stage: int
    size: int
    memory: memoryview
    """Shared with the trainer: for each slot, ``size`` bytes that came in, then ``size`` bytes that go out."""
    send: Callable[[messages.Command], None]

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

    def __init__(self, link: wire.Link, stream: Stream, shaping: Shaping, channels: BulkService | None = None) -> None:
        self.link = link
        self._stream = stream
        self._channels = channels
        self.bulk = BulkPipe(link.pipe, stream, channels, shaping)
        self._scope = trio.CancelScope()
        # Messages whose data follow them; and each `Settled`, which must not overtake its `Forward`.
        self._transfers: deque[tuple[wire.Control, memoryview | None]] = deque()
        self._wakeup = trio.Event()
        self._is_posted = False  # something, since the last `flush`

    def close(self) -> None:
        """Cancel `run`, which ends soon after."""
        self._scope.cancel()

    def send(self, message: wire.Control, data: memoryview | None = None) -> None:
        """Queue a message, for `flush`; ``data`` are read when its turn comes."""
        if isinstance(message, wire.Forward | wire.Gradient) or (isinstance(message, wire.Settled) and self._transfers):
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

    async def greet(self, own: wire.Hello | wire.Welcome) -> None:
        """Exchange greetings, of which ``own`` is this node's; call it before `run`, which handles what came with them.

        Closes the stream if the greeting fails.
        """
        try:
            if self.link.is_upstream:
                await self._stream.send_all(self.link.send(own))
            while not self.link.is_open:
                data = await self._stream.receive_some(READ_BYTES)
                if not data:
                    raise RemoteProtocolError("the stream ended before its greeting")
                self.link.pipe.receive_data(data)
                payload = self.link.pipe.next_event()
                if isinstance(payload, bytes) and isinstance(self.link.hear(payload), wire.Hello):
                    await self._stream.send_all(self.link.send(own))
        finally:
            if not self.link.is_open:
                await self._stream.aclose()

    async def run(self, on_event: Callable[[wire.Event], None], on_routed: Callable[[], None] = lambda: None) -> None:
        """Run until the stream breaks, the peer breaks the protocol or stops in the middle of data, or `close`.

        ``on_routed`` is called once both ends know which route data take. Closes the stream and its channel.
        """

        async def hear(payload: bytes) -> None:
            if (event := self.link.hear(payload)) is not None:
                on_event(event)

        def receive(index: int) -> None:
            if (event := self.link.receive(index)) is not None:
                on_event(event)

        async def await_route() -> None:
            await self.bulk.wait_routed()
            on_routed()

        try:
            with self._scope, self._channels.expecting(self._stream.peer) if self._channels else nullcontext():
                async with trio.open_nursery() as nursery:
                    for task in (self._write_data, self._watch_progress, await_route):
                        nursery.start_soon(task)
                    self.bulk.begin(PATIENCE)
                    await self.bulk.run(hear, receive)
                    nursery.cancel_scope.cancel()
        except* (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError, RemoteProtocolError) as group:
            logger.debug("a link ends: %r", group)
        finally:
            self.bulk.close(is_clean=False)
            await self._stream.aclose()

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
        held_up = self.bulk.seconds_held_up + (0.0 if channel is None else channel.seconds_held_up)
        awaited = None if pipe.arriving is None else pipe.arriving.name
        return (awaited, pipe.num_routes), num_come, held_up

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
            is_copied = isinstance(message, wire.Gradient) and self.link.pipe.channel is not None
            self.bulk.add(Outgoing(memoryview(bytes(data)) if is_copied else data), is_held=True)

    def _post(self, message: wire.Control) -> None:
        self.bulk.post(self.link.send(message), is_held=True)
        self._is_posted = True


@dataclass(eq=False)
class PipelineService:
    """Runs this node's part of the pipeline, and the links to the nodes of the neighbouring stages.

    Without ``channels`` everything goes over the streams. ``warn`` shows the owner which peers are avoided, and why.
    """

    _host: Host
    _messenger: Messenger
    _manifest: Manifest
    run_id: InitVar[bytes]
    _shaping: Shaping
    _channels: BulkService | None
    _rng: random.Random
    _warn: Callable[[str], None] = lambda text: None

    def __post_init__(self, run_id: bytes) -> None:
        self.counts = Counts()
        """The counts since the node began."""
        self.links: dict[int, ActivationLink] = {}
        self._nodes: Sequence[frozenset[bytes]] = [frozenset()] * self._manifest.model.num_stages  # live, of each stage
        self._hello = wire.Hello(run_id, 0, wire.shape_hash(self._manifest))
        self._sizes = wire.link_bytes(self._manifest)
        self._avoidance = Avoidance()
        self._worker: Worker | None = None
        self._machine: Pipeline | None = None
        self._driver = Driver[machine.Event, machine.Output](self._carry_out, TimerFired(), self.flush)
        self._nursery: trio.Nursery | None = None
        self._numbers = itertools.count()  # of links
        self._bytes_sent = self._bytes_received = 0  # over links that have ended
        self._host.set_handler(ACTIVATIONS_PROTOCOL, self._serve)

        def be_told(peer: bytes, payload: bytes) -> None:
            self.handle(machine.Tell(peer, wire.decode_question(payload)))

        self._messenger.set_receiver(MICROBATCH_PROTOCOL, wire.MAX_QUESTION_BYTES, be_told)

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled; call `begin` after it has started."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._driver.run)
            task_status.started()

    def status(self) -> PipelineStatus | None:
        """Return the state of the pipeline, for display; None without a trainer."""
        if self._worker is None or self._machine is None:
            return None
        return PipelineStatus(
            stage=self._worker.stage,
            in_flight=self._machine.num_in_flight,
            bytes_sent=self._bytes_sent + sum(link.bulk.bytes_sent for link in self.links.values()),
            bytes_received=self._bytes_received + sum(link.bulk.bytes_received for link in self.links.values()),
            **msgspec.to_builtins(self.counts),
        )

    def begin(self, worker: Worker) -> None:
        """Start with a trainer that is ready."""
        self._worker = worker
        manifest, author = self._manifest, self._host.author
        self._machine = Pipeline(manifest, author, worker.stage, self._rng, self.counts, self._avoidance)
        self._driver.begin(self._machine.handle)
        self.set_nodes(self._nodes)

    def end(self) -> None:
        """Drop the trainer, which is gone, and its microbatches."""
        self._worker = self._machine = None
        self._driver.end()
        for link in self.links.values():
            link.close()

    def set_nodes(self, nodes: Sequence[frozenset[bytes]]) -> None:
        """Set the live nodes of each stage, this one included."""
        self._nodes = nodes
        if self._worker is None:
            return
        stage = self._worker.stage
        following = nodes[stage + 1] if stage + 1 < len(nodes) else frozenset()
        previous = nodes[stage - 1] if stage else frozenset()
        self.handle(machine.NodesChanged(following, max(1, len(nodes[stage])), len(previous), len(nodes[0])))

    def handle(self, event: machine.Event) -> None:
        """Pass an event to the machine, if there is one, and carry out its outputs."""
        self._driver.handle(event)

    def _carry_out(self, output: machine.Output) -> None:
        worker, links = self._worker, self.links
        assert worker is not None, "outputs are cleared with the machine"
        match output:
            case SetTimer(at):
                self._driver.set_timer(at)
            case machine.Tell(peer, message):
                self._messenger.send_nowait(peer, MICROBATCH_PROTOCOL, encode(message))
            case machine.Avoided(peer, reason, seconds):
                self._warn(f"no microbatches to or from {short_name(peer)} for {seconds:.0f} s: {reason}")
            case machine.OpenLink(peer, is_return):
                assert self._nursery is not None, "links are opened while the service runs"
                self._nursery.start_soon(self._open, peer, is_return)
            case machine.LinkClosed(number) if number in links:
                links[number].close()
            case machine.ReceiveInto(number, slot) if number in links:
                landed = links[number].link.landed
                worker.incoming(slot)[: len(landed)] = landed
            case machine.Send(number, message, slot) if number in links:
                link = links[number]
                link.send(message, None if slot is None else worker.outgoing(slot)[: link.link.size])
            case _ if isinstance(output, messages.Command):
                worker.send(output)

    # Links

    def flush(self) -> None:
        """Send what was queued on links."""
        for link in self.links.values():
            link.flush()

    async def _open(self, peer: bytes, is_return: bool) -> None:
        """Open a link to a node of the next stage, or (``is_return``) to an origin, and run it to its end."""
        worker = self._worker
        if worker is None:
            return
        hello = msgspec.structs.replace(self._hello, stage=0 if is_return else worker.stage + 1)
        try:
            with trio.fail_after(GREETING_TIMEOUT):
                stream = await self._host.open_stream(peer, ACTIVATIONS_PROTOCOL, GREETING_TIMEOUT)
                link = ActivationLink(wire.Link(True, hello, self._sizes), stream, self._shaping, self._channels)
                await link.greet(hello)
        except (PeerUnreachableError, RemoteProtocolError, trio.BrokenResourceError, trio.TooSlowError):
            if self._worker is worker:
                self.handle(machine.LinkFailed(peer, is_return))
            return
        await self._run(
            link, machine.LinkOpened(next(self._numbers), peer, is_upstream=True, is_return=is_return), worker
        )

    async def _serve(self, stream: Stream) -> None:
        """Serve a link from the stage before, or from the last stage, which returns what was drawn here."""
        worker = self._worker
        if worker is None or stream.peer not in self._nodes[worker.stage - 1]:
            await stream.aclose()
            return
        hello = msgspec.structs.replace(self._hello, stage=worker.stage)
        link = ActivationLink(wire.Link(False, hello, self._sizes), stream, self._shaping, self._channels)
        try:
            with trio.fail_after(GREETING_TIMEOUT):
                await link.greet(wire.Welcome(0))
        except (RemoteProtocolError, trio.BrokenResourceError, trio.TooSlowError):
            return
        opened = machine.LinkOpened(next(self._numbers), stream.peer, is_upstream=False, is_return=worker.stage == 0)
        await self._run(link, opened, worker)

    async def _run(self, link: ActivationLink, opened: machine.LinkOpened, worker: Worker) -> None:
        if self._worker is not worker:  # it has been replaced in the meantime
            link.close()
        else:
            self.links[opened.link] = link
            if opened.is_upstream:
                self.handle(opened)

        def on_routed() -> None:
            # A channel takes seconds to open, or to fail. Until then the downstream node gives the link no credits, so
            # that microbatches take other links.
            if not opened.is_upstream and self._worker is worker:
                self.handle(opened)

        try:
            await link.run(lambda event: self.handle(machine.Received(opened.link, event)), on_routed)
        finally:
            self.links.pop(opened.link, None)
            self._bytes_sent += link.bulk.bytes_sent
            self._bytes_received += link.bulk.bytes_received
            self.handle(machine.LinkClosed(opened.link))
