"""Microbatches in and out of a node that holds a stage: carries out what `farandole.protocol.pipeline` decides.

Activations come from neighbours' streams (`farandole.node.loop.stages.activation_link`) straight into memory that the
trainer shares, and go out from there. The machine lives as long as its trainer does: without one there are no links.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import trio

from farandole.protocol import pipeline_events as machine
from farandole.protocol import trainer_messages as messages
from farandole.protocol.activations import (
    MAX_QUESTION_BYTES,
    Answer,
    Credits,
    DataReceived,
    Dropped,
    Event,
    Forward,
    Gradient,
    Hello,
    Link,
    Question,
    Settled,
    Welcome,
    decode_question,
    encode_question,
    shape_hash,
)
from farandole.protocol.errors import RemoteProtocolError
from farandole.protocol.manifest import Manifest
from farandole.protocol.microbatches import Counts
from farandole.protocol.pipeline import Pipeline, PipelineSettings

from ...base.bandwidth import Shaping
from ...base.driver import Driver
from ...base.errors import PeerUnreachableError
from ...base.streams import Stream, StreamHost, close_stream
from ...bulk.channel import BulkChannel
from ...bulk.transport import Channels
from ...state.messenger import Messenger
from ...status.status import PipelineStatus
from .activation_link import ActivationLink

if TYPE_CHECKING:
    from trio_typing import TaskStatus

ACTIVATIONS_PROTOCOL: Final = "/farandole/activations/1"
MICROBATCH_PROTOCOL: Final = "/farandole/microbatch/1"
# Dial included.
GREETING_TIMEOUT: Final = 10.0


@dataclass(frozen=True, slots=True)
class Worker:
    """The trainer of a stage, as the pipeline uses it."""

    stage: int
    memory: memoryview
    """2 `in_flight` times the size of one microbatch's activations."""
    send: Callable[[messages.Command], None]
    on_drained: Callable[[int], None]
    """The round has nothing under way any more."""
    on_measured: Callable[[], None]
    """The trainer has the losses of the held-out text."""


class PipelineService:
    """This node's part in the pipeline.

    ``is_neighbour(peer, stage)`` says whether a peer is a live member of that stage.
    """

    def __init__(
        self,
        host: StreamHost,
        messenger: Messenger,
        manifest: Manifest,
        run_id: bytes,
        author: bytes,
        shaping: Shaping,
        rng: random.Random,
        *,
        is_neighbour: Callable[[bytes, int], bool],
    ) -> None:
        self.channels: Channels[BulkChannel] | None = None
        """Ways beside the streams; without them everything goes over the streams."""
        self.counts = Counts()
        """Since the node began."""
        self._bytes_sent = 0
        self._bytes_received = 0
        self._host = host
        self._messenger = messenger
        self._manifest = manifest
        self._run_id = run_id
        self._author = author
        self._shaping = shaping
        self._rng = rng
        self._is_neighbour = is_neighbour
        self._shape = shape_hash(manifest)
        self._num_stages = manifest.model.num_stages
        self._nodes: Sequence[frozenset[bytes]] = [frozenset()] * self._num_stages
        self._worker: Worker | None = None
        self._machine: Pipeline | None = None
        self._size = 0
        self._links: dict[int, ActivationLink] = {}
        self._numbers = itertools.count()
        self._places: dict[tuple[int, int], memoryview] = {}
        self._driver = Driver[machine.Event, machine.Output](self._carry_out, machine.PipelineTimerFired())
        self._nursery: trio.Nursery | None = None
        host.set_handler(ACTIVATIONS_PROTOCOL, self._serve)
        messenger.set_receiver(MICROBATCH_PROTOCOL, MAX_QUESTION_BYTES, self._be_asked, lambda peer, protocol: None)

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled; `begin` comes after it has started."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._driver.run)
            task_status.started()

    def status(self) -> PipelineStatus | None:
        """For people; None without a trainer."""
        if self._worker is None:
            return None
        counts, links = self.counts, self._links.values()
        return PipelineStatus(
            stage=self._worker.stage,
            in_flight=self.num_in_flight,
            begun=counts.begun,
            kept=counts.kept,
            dropped=counts.dropped,
            rerouted=counts.rerouted,
            taken_out=counts.taken_out,
            refused=counts.refused,
            reasons=dict(counts.reasons),
            bytes_sent=self._bytes_sent + sum(link.bytes_sent for link in links),
            bytes_received=self._bytes_received + sum(link.bytes_received for link in links),
        )

    @property
    def num_in_flight(self) -> int:
        """Microbatches that the trainer holds something of."""
        return 0 if self._machine is None else self._machine.num_in_flight

    def begin(self, worker: Worker) -> None:
        """A trainer is ready."""
        settings = self._manifest.pipeline
        self._worker = worker
        self._size = len(worker.memory) // (2 * settings.in_flight)
        self._machine = Pipeline(
            PipelineSettings(
                author=self._author,
                stage=worker.stage,
                num_stages=self._num_stages,
                quota=self._manifest.inner.batch_size // settings.microbatch_size,
                in_flight=settings.in_flight,
                microbatch_seconds=settings.microbatch_seconds,
                overlap=settings.overlap,
            ),
            self._rng,
            self.counts,
        )
        self._driver.begin(self._machine)
        self.set_nodes(self._nodes)

    def end(self) -> None:
        """The trainer is gone, and what was under way with it."""
        self._worker = self._machine = None
        self._driver.end()
        for link in self._links.values():
            link.close()

    def set_nodes(self, nodes: Sequence[frozenset[bytes]]) -> None:
        """The live nodes of each stage, this one included."""
        self._nodes = nodes
        if self._worker is None:
            return
        stage = self._worker.stage
        following = nodes[stage + 1] if stage + 1 < self._num_stages else frozenset()
        previous = nodes[stage - 1] if stage else frozenset()
        self.handle(machine.NodesChanged(following, max(1, len(nodes[stage])), len(previous), len(nodes[0])))

    def handle(self, event: machine.Event) -> None:
        """Pass an event to the machine, if there is one, and carry out its outputs."""
        self._driver.handle(event)

    def _carry_out(self, output: machine.Output) -> None:
        worker = self._worker
        assert worker is not None, "outputs are cleared with the machine"
        match output:
            case machine.SetPipelineTimer(at):
                self._driver.set_timer(at)
            case machine.Compute(work, slot, is_following, is_held_out, number):
                worker.send(messages.Work(work, slot, is_following, is_held_out, number))
            case machine.TakeStep():
                worker.send(messages.TakeInnerStep())
            case machine.RoundDrained(round_index):
                worker.on_drained(round_index)
            case machine.Measured():
                worker.on_measured()
            case machine.OpenLink(peer, is_return):
                assert self._nursery is not None, "links are opened while the service runs"
                self._nursery.start_soon(self._open, peer, is_return)
            case machine.AskOrigin(origin, ticket):
                self._messenger.send_nowait(origin, MICROBATCH_PROTOCOL, encode_question(Question(ticket)))
            case machine.Tell(peer, ticket, is_kept):
                self._messenger.send_nowait(peer, MICROBATCH_PROTOCOL, encode_question(Answer(ticket, is_kept)))
            case _:
                if output.link in self._links:
                    self._carry_out_on(self._links[output.link], output)

    def _carry_out_on(self, link: ActivationLink, output: _OnLink) -> None:
        match output:
            case machine.CloseLink():
                link.close()
            case machine.ReceiveInto(_, index, slot):
                self._places[link.number, index] = self._incoming(slot)
            case machine.SendForward(_, slot, ticket, origin, round_index, seconds_left, is_held_out):
                forward = Forward(ticket, origin, round_index, seconds_left, is_held_out=is_held_out)
                link.send(forward, self._outgoing(slot))
            case machine.SendGradient(_, index, slot):
                link.send(Gradient(index), self._outgoing(slot))
            case machine.SendDropped(_, index, reason, is_untouched):
                link.send(Dropped(index, reason, is_untouched))
            case machine.SendSettled(_, index, is_kept):
                link.send(Settled(index, is_kept))
            case machine.SendCredits(_, total):
                link.send(Credits(total))

    def _incoming(self, slot: int) -> memoryview:
        assert self._worker is not None
        return self._worker.memory[2 * slot * self._size : (2 * slot + 1) * self._size]

    def _outgoing(self, slot: int) -> memoryview:
        assert self._worker is not None
        return self._worker.memory[(2 * slot + 1) * self._size : (2 * slot + 2) * self._size]

    # Questions

    def _be_asked(self, peer: bytes, payload: bytes) -> None:
        match decode_question(payload):
            case Question(ticket):
                self.handle(machine.Asked(peer, ticket))
            case Answer(ticket, is_kept):
                self.handle(machine.OriginAnswered(peer, ticket, is_kept))

    # Links

    async def _open(self, peer: bytes, is_return: bool) -> None:
        """As the machine has asked: a link to the next stage, or home."""
        worker = self._worker
        try:
            if worker is None:
                return
            with trio.fail_after(GREETING_TIMEOUT):
                stream = await self._host.open_stream(peer, ACTIVATIONS_PROTOCOL, GREETING_TIMEOUT)
                link = self._link(stream, is_upstream=True, stage=0 if is_return else worker.stage + 1)
                link.send(self._hello(0 if is_return else worker.stage + 1))
                await link.greet(lambda event: None)
        except (PeerUnreachableError, RemoteProtocolError, trio.BrokenResourceError, trio.TooSlowError):
            if self._worker is worker:
                self.handle(machine.LinkFailed(peer, is_return))
            return
        await self._run_link(link, machine.LinkOpened(link.number, peer, is_upstream=True, is_return=is_return), worker)

    async def _serve(self, stream: Stream) -> None:
        """A node of the stage before opens a link; or one of the last stage, to send home what was drawn here."""
        worker = self._worker
        if worker is None or not self._is_neighbour(stream.peer, (worker.stage - 1) % self._num_stages):
            await close_stream(stream)
            return
        link = self._link(stream, is_upstream=False, stage=worker.stage)

        def welcome(event: Event) -> None:
            if isinstance(event, Hello):
                link.send(Welcome(0))

        try:
            with trio.fail_after(GREETING_TIMEOUT):
                await link.greet(welcome)
        except (RemoteProtocolError, trio.BrokenResourceError, trio.TooSlowError):
            return
        is_return = worker.stage == 0
        opened = machine.LinkOpened(link.number, stream.peer, is_upstream=False, is_return=is_return)
        await self._run_link(link, opened, worker)

    def _link(self, stream: Stream, *, is_upstream: bool, stage: int) -> ActivationLink:
        link = Link(is_upstream, self._hello(stage), self._size)
        return ActivationLink(next(self._numbers), link, stream, self._shaping, self.channels)

    def _hello(self, stage: int) -> Hello:
        return Hello(self._run_id, stage, self._shape)

    async def _run_link(self, link: ActivationLink, opened: machine.LinkOpened, worker: Worker) -> None:
        if self._worker is not worker:  # it has been replaced meanwhile
            link.close()
        else:
            self._links[link.number] = link
            self.handle(opened)
        try:
            await link.run(self._hear)
        finally:
            self._links.pop(link.number, None)
            self._bytes_sent += link.bytes_sent
            self._bytes_received += link.bytes_received
            self._places = {place: memory for place, memory in self._places.items() if place[0] != link.number}
            self.handle(machine.LinkClosed(link.number))

    def _hear(self, link: ActivationLink, event: Event) -> None:
        number = link.number
        match event:
            case Forward(ticket, origin, round_index, seconds_left, is_held_out):
                index = link.link.num_forwarded - 1
                self.handle(machine.Arriving(number, index, ticket, origin, round_index, seconds_left, is_held_out))
                self._place(link, index)
            case Gradient(index):
                self.handle(machine.GradientArriving(number, index))
                self._place(link, index)
            case DataReceived(index):
                self.handle(machine.Arrived(number, index))
            case Dropped(index, reason, is_untouched):
                self.handle(machine.HopDropped(number, index, reason, is_untouched))
            case Settled(index, is_kept):
                self.handle(machine.HopSettled(number, index, is_kept))
            case Credits(total):
                self.handle(machine.CreditsGiven(number, total))
            case Hello() | Welcome():
                raise RemoteProtocolError("greeted twice")

    def _place(self, link: ActivationLink, index: int) -> None:
        """Where the machine has said; nowhere if it does not want it."""
        memory = self._places.pop((link.number, index), None)
        if link.link.awaits_place:
            link.link.place(memory)


_OnLink = (
    machine.CloseLink
    | machine.ReceiveInto
    | machine.SendForward
    | machine.SendGradient
    | machine.SendDropped
    | machine.SendSettled
    | machine.SendCredits
)
