"""Microbatches in and out of a node that holds a stage: carries out what `farandole.protocol.stages.pipeline` decides.

Activations come from neighbours' streams (`farandole.node.loop.activation_links`) straight into memory that the trainer
shares, and are sent from there. The machine lives as long as its trainer: without one there are no links.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from farandole.protocol.run.manifest import Manifest
from farandole.protocol.stages import pipeline_events as machine
from farandole.protocol.stages.activations import MAX_QUESTION_BYTES, decode_question, encode_question
from farandole.protocol.stages.microbatches import Counts
from farandole.protocol.stages.pipeline import Pipeline
from farandole.protocol.stages.pipeline_links import Avoidance
from farandole.protocol.trainer import trainer_messages as messages
from farandole.protocol.wire.identity import short_name
from farandole.protocol.wire.timers import SetTimer, TimerFired

from ..base.driver import Driver
from ..state.messenger import Messenger
from ..status.status import PipelineStatus
from .activation_links import Links, Worker

if TYPE_CHECKING:
    from trio_typing import TaskStatus


MICROBATCH_PROTOCOL: Final = "/farandole/microbatch/1"


class PipelineService:
    """Runs this node's part of the pipeline.

    ``links`` lead to the nodes of the neighbouring stages. ``warn`` shows the owner which peers are avoided, and why.
    """

    def __init__(
        self,
        links: Links,
        messenger: Messenger,
        manifest: Manifest,
        author: bytes,
        rng: random.Random,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.links = links
        self.counts = Counts()
        """The counts since the node began."""
        self._messenger = messenger
        self._manifest = manifest
        self._author = author
        self._rng = rng
        self._warn = warn
        self._avoidance = Avoidance()
        self._worker: Worker | None = None
        self._machine: Pipeline | None = None
        self._driver = Driver[machine.Event, machine.Output](self._carry_out, TimerFired(), links.flush)
        self._nursery: trio.Nursery | None = None

        def be_told(peer: bytes, payload: bytes) -> None:
            self.handle(machine.Tell(peer, decode_question(payload)))

        messenger.set_receiver(MICROBATCH_PROTOCOL, MAX_QUESTION_BYTES, be_told, lambda peer, protocol: None)

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled; call `begin` after it has started."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._driver.run)
            task_status.started()

    def status(self) -> PipelineStatus | None:
        """Return the state of the pipeline, for display; None without a trainer."""
        if self._worker is None:
            return None
        return PipelineStatus(
            stage=self._worker.stage,
            in_flight=self.num_in_flight,
            bytes_sent=self.links.bytes_sent,
            bytes_received=self.links.bytes_received,
            **msgspec.to_builtins(self.counts),
        )

    @property
    def num_in_flight(self) -> int:
        """Return the number of microbatches of which the trainer holds data."""
        return 0 if self._machine is None else self._machine.num_in_flight

    def begin(self, worker: Worker) -> None:
        """Start with a trainer that is ready."""
        self._worker = worker
        self._machine = Pipeline(self._manifest, self._author, worker.stage, self._rng, self.counts, self._avoidance)
        self.links.begin(worker, self.handle)
        self._driver.begin(self._machine.handle)
        self.set_nodes(self.links.nodes)

    def end(self) -> None:
        """Drop the trainer, which is gone, and its microbatches."""
        self._worker = self._machine = None
        self._driver.end()
        self.links.end()

    def set_nodes(self, nodes: Sequence[frozenset[bytes]]) -> None:
        """Set the live nodes of each stage, this one included."""
        self.links.nodes = nodes
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
        worker, links = self._worker, self.links.by_number
        assert worker is not None, "outputs are cleared with the machine"
        match output:
            case SetTimer(at):
                self._driver.set_timer(at)
            case messages.Work() | messages.Settle() | messages.TakeInnerStep():
                worker.send(output)
            case machine.RoundDrained() | machine.Measured():
                worker.report(output)
            case machine.Tell(peer, message):
                self._messenger.send_nowait(peer, MICROBATCH_PROTOCOL, encode_question(message))
            case machine.Avoided(peer, reason, seconds):
                self._warn(f"no microbatches to or from {short_name(peer)} for {seconds:.0f} s: {reason}")
            case machine.OpenLink(peer, is_return):
                assert self._nursery is not None, "links are opened while the service runs"
                self._nursery.start_soon(self.links.open, peer, is_return)
            case machine.CloseLink(number) if number in links:
                links[number].close()
            case machine.ReceiveInto(number, slot) if number in links:
                worker.incoming(slot)[:] = links[number].link.landed
            case machine.Send(number, message, slot) if number in links:
                links[number].send(message, None if slot is None else worker.outgoing(slot))
