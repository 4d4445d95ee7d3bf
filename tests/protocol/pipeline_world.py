"""Many pipelines under a virtual clock, joined by real links; a trainer is modelled as a set of tickets in its sum."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from farandole.protocol.run.manifest import InnerConfig, Manifest, ModelConfig, PipelineConfig
from farandole.protocol.stages import activations as wire
from farandole.protocol.stages import pipeline_events as machine
from farandole.protocol.stages.pipeline import Pipeline
from farandole.protocol.trainer.trainer_messages import (
    FinishRound,
    InnerStepTaken,
    Settle,
    TakeInnerStep,
    Train,
    Validate,
    Work,
    Worked,
)
from farandole.protocol.wire.timers import SetTimer, TimerFired
from farandole.testnet.simulate.simulation import Simulation

from .stages.activations.sides import next_event

SIZE = 3 * wire.DATA_BYTES // 2  # two frames
HELLO = wire.Hello(run_id=bytes(32), stage=0, shape=bytes(32))


def manifest_of(
    num_stages: int, quota: int, in_flight: int, microbatch_seconds: float, overlap: bool = False
) -> Manifest:
    return Manifest(
        "a run",
        ModelConfig(num_stages, 8, 1, 8, 8, 256, num_stages=num_stages),
        inner=InnerConfig(batch_size=quota),
        pipeline=PipelineConfig(in_flight=in_flight, microbatch_seconds=microbatch_seconds, overlap=overlap),
    )


@dataclass
class Wire:
    """A link: both ends, and the data in transit."""

    number: int
    upstream: Node
    downstream: Node
    is_return: bool
    ends: dict[bytes, wire.Link]
    is_closed: bool = False
    arrives_at: dict[bytes, float] = field(default_factory=dict)


class Node:
    def __init__(self, world: World, author: bytes, stage: int, seconds: float, rng: random.Random) -> None:
        self.world, self.author, self.stage, self.seconds = world, author, stage, seconds
        self.pipeline = Pipeline(
            manifest_of(world.num_stages, world.quota, world.in_flight, world.microbatch_seconds, world.overlap),
            author,
            stage,
            rng,
        )
        self.is_alive = True
        self.is_frozen = False
        self.round, self.is_followed = 0, False
        self.memory: dict[int, bytes] = {}  # slot -> received data
        self.out: dict[int, bytes] = {}  # slot -> data to send: the ticket and the kind of data
        self.tickets: dict[int, bytes] = {}
        self.sums: list[set[bytes]] = [set(), set()]  # gradients of this inner step, and of the following one
        self.began: dict[int, int] = {}  # slots of which the trainer holds data -> the sum that it belongs to
        self.held_out: set[int] = set()  # slots with text whose loss is measured
        self.has_held_out = True
        self.measured: list[int] = []
        self.num_measured = 0  # number of times that the pipeline finished with it
        self.falsifies = ""  # "activations" or "gradients": the others' trainers find outliers
        self.avoided: dict[bytes, str] = {}
        self.kept: list[bytes] = []
        self.steps: list[int] = []
        self.drained: list[int] = []
        self.busy_until = 0.0
        self.busy_seconds = 0.0
        self.timer = 0

    @property
    def summed(self) -> set[bytes]:
        return self.sums[0] | self.sums[1]

    def handle(self, event: machine.Event) -> None:
        if not self.is_alive or self.is_frozen:
            return
        for output in self.pipeline.handle(event, self.world.now):
            self.carry_out(output)

    def carry_out(self, output: machine.Output) -> None:
        world = self.world
        match output:
            case SetTimer(at):
                self.timer += 1
                number = self.timer
                if at < float("inf"):
                    world.call_at(at, lambda: self.handle(TimerFired()) if number == self.timer else None)
            case machine.OpenLink(peer, is_return):
                world.open_link(self, peer, is_return)
            case machine.LinkClosed(link):
                world.close(world.wires[link])
            case machine.ReceiveInto(link, slot):
                landed = world.wires[link].ends[self.author].landed
                self.memory[slot] = bytes(landed[4 : 4 + int.from_bytes(landed[:4], "big")])
            case machine.Send(link, message, slot):
                if isinstance(message, wire.Forward) and slot is not None:
                    self.tickets[slot] = message.ticket
                if world.wires[link].ends[self.author].means_something(message):
                    world.send(self, link, message, b"" if slot is None else self.out[slot])
            case machine.Tell(peer, message):
                world.tell(self, peer, machine.Tell(self.author, message))
            case Work():
                self.compute(output)
            case Settle():
                self.work(0.0, partial(self.settle, output))
            case Validate():
                self.num_measured += 1
            case TakeInnerStep():
                self.work(self.seconds, self.step)
            case machine.Avoided(peer, reason, _):
                self.avoided[peer] = reason
            case FinishRound(round_index):
                self.work(0.0, partial(self.drain, round_index))

    def work(self, seconds: float, then: Callable[[], None]) -> None:
        self.busy_until = max(self.busy_until, self.world.now) + seconds
        self.busy_seconds += seconds
        self.world.call_at(self.busy_until, then)

    def begin_round(self, round_index: int) -> None:
        self.round, self.is_followed = round_index, self.world.is_followed
        self.handle(Train(round_index, 0, is_followed=self.is_followed))

    def end_round(self) -> None:
        self.handle(FinishRound(self.round))

    def drain(self, round_index: int) -> None:
        assert self.is_followed or (not self.summed and not self.began)
        self.drained.append(round_index)
        if self.is_followed:
            self.world.call_after(self.world.pause, lambda: self.begin_round(round_index + 1))

    def step(self) -> None:
        if not self.is_alive:
            return
        assert 0 not in self.began.values(), "a step while something of it is under way"
        self.kept += self.sums[0]
        self.steps.append(len(self.sums[0]))
        self.sums = [self.sums[1], set()]
        self.began = dict.fromkeys(self.began, 0)
        self.handle(InnerStepTaken(True))

    def compute(self, job: Work) -> None:
        work, slot = job.work, job.slot

        def world_falsifies(job: Work) -> bool:
            kind = "gradients" if job.work == "backward" else "activations"
            return self.world.nodes[job.sender].falsifies == kind

        def done() -> None:
            if not self.is_alive:
                return
            if work == "draw" and job.is_held_out and not self.has_held_out:
                self.handle(Worked("nothing is held out"))
                return
            if job.sender and world_falsifies(job):
                self.handle(Worked("an outlier", is_outlier=True))
                return
            if work in ("draw", "forward"):
                assert slot not in self.began.keys() | self.held_out
                if job.is_held_out:
                    self.held_out.add(slot)
                else:
                    self.began[slot] = int(job.is_following)
            if work == "draw":
                self.tickets[slot] = self.pipeline._jobs.given[0][1].ticket
                self.out[slot] = self.tickets[slot] + b"a0"
            elif work == "forward":
                self.tickets[slot] = self.pipeline._jobs.given[0][1].ticket
                assert self.memory[slot] == self.tickets[slot] + b"a%d" % (self.stage - 1)
                self.out[slot] = self.tickets[slot] + b"a%d" % self.stage
            elif work == "tail":
                assert self.memory[slot] == self.tickets[slot] + b"a%d" % (self.world.num_stages - 1)
                self.out[slot] = self.tickets[slot] + b"g%d" % self.world.num_stages
                if job.is_held_out:
                    self.measured.append(job.number)
            elif work == "backward":
                assert self.memory[slot] == self.tickets[slot] + b"g%d" % (self.stage + 1)
                self.sums[self.began[slot]].add(self.tickets[slot])
                self.out[slot] = self.tickets[slot] + b"g%d" % self.stage
            self.handle(Worked())

        self.work(self.seconds, done)

    def settle(self, settlement: Settle) -> None:
        slot = settlement.slot
        if slot in self.held_out:
            assert not settlement.is_kept
            self.held_out.remove(slot)
            return
        sum_ = self.sums[self.began.pop(slot)]
        if settlement.is_kept:
            assert self.tickets[slot] in sum_
        else:
            sum_.discard(self.tickets.get(slot, b""))


class World(Simulation):
    def __init__(
        self,
        stages: list[int],
        *,
        seed: int = 0,
        quota: int = 4,
        in_flight: int = 6,
        latency: float = 0.01,
        microbatch_seconds: float = 5.0,
        seconds: float = 0.01,
        overlap: bool = False,
        is_followed: bool = False,
    ) -> None:
        """``stages``: the number of nodes of each stage."""
        super().__init__(seed)
        self.num_stages, self.quota, self.in_flight = len(stages), quota, in_flight
        self.latency, self.microbatch_seconds = latency, microbatch_seconds
        self.overlap, self.is_followed, self.pause = overlap, is_followed, 0.05
        self.wires: dict[int, Wire] = {}
        self._numbers = itertools.count()
        self.nodes: dict[bytes, Node] = {}
        for stage, count in enumerate(stages):
            for _ in range(count):
                self.add(stage, seconds)
        self.announce()
        for node in self.nodes.values():
            node.begin_round(0)

    def add(self, stage: int, seconds: float) -> Node:
        author = len(self.nodes).to_bytes(32, "big")
        node = self.nodes[author] = Node(self, author, stage, seconds, random.Random(self.rng.random()))
        return node

    def of_stage(self, stage: int) -> list[Node]:
        return [node for node in self.nodes.values() if node.stage == stage and node.is_alive]

    def announce(self) -> None:
        """Tell all nodes which nodes are alive."""
        for node in self.nodes.values():
            following = self.of_stage(node.stage + 1)
            node.handle(
                machine.NodesChanged(
                    frozenset(other.author for other in following),
                    len(self.of_stage(node.stage)),
                    len(self.of_stage(node.stage - 1)),
                    len(self.of_stage(0)),
                )
            )

    def run(self, seconds: float) -> None:
        self.run_until(self.now + seconds)

    def delay(self) -> float:
        return self.latency * self.rng.uniform(0.5, 1.5)

    def open_link(self, node: Node, peer: bytes, is_return: bool) -> None:
        other = self.nodes[peer]

        def arrive() -> None:
            if not (other.is_alive and node.is_alive):
                node.handle(machine.LinkFailed(peer, is_return))
                return
            number = next(self._numbers)
            ends = {
                author: wire.Link(is_upstream, HELLO, (SIZE, SIZE))
                for author, is_upstream in ((node.author, True), (peer, False))
            }
            self.wires[number] = Wire(number, node, other, is_return, ends)
            for sender, receiver, message in ((node, other, HELLO), (other, node, wire.Welcome(0))):
                ends[receiver.author].pipe.receive_data(ends[sender.author].send(message))
                assert next_event(ends[receiver.author]) == message
            node.handle(machine.LinkOpened(number, peer, is_upstream=True, is_return=is_return))
            other.handle(machine.LinkOpened(number, node.author, is_upstream=False, is_return=is_return))

        self.call_after(self.delay(), arrive)

    def close(self, wire_: Wire) -> None:
        if wire_.is_closed:
            return
        wire_.is_closed = True
        for node in (wire_.upstream, wire_.downstream):
            self.call_after(self.delay(), partial(node.handle, machine.LinkClosed(wire_.number)))

    def send(self, node: Node, number: int, message: wire.Control, content: bytes = b"") -> None:
        wire_ = self.wires[number]
        if wire_.is_closed:
            return
        end = wire_.ends[node.author]
        frames = [end.send(message)]
        if content:
            data = memoryview((len(content).to_bytes(4, "big") + content).ljust(SIZE, b"."))
            pieces = (data[at : at + wire.DATA_BYTES] for at in range(0, SIZE, wire.DATA_BYTES))
            frames += [end.pipe.send_chunk(piece) for piece in pieces]
        other = wire_.downstream if node is wire_.upstream else wire_.upstream
        for frame in frames:
            when = max(self.now + self.delay(), wire_.arrives_at.get(node.author, 0.0))
            wire_.arrives_at[node.author] = when
            self.call_at(when, partial(self.receive, wire_, other, frame))

    def receive(self, wire_: Wire, node: Node, frame: bytes) -> None:
        if wire_.is_closed or not node.is_alive or node.is_frozen:
            return
        end = wire_.ends[node.author]
        end.pipe.receive_data(frame)
        while (event := next_event(end)) is not None:
            node.handle(machine.Received(wire_.number, event))

    def tell(self, node: Node, peer: bytes, event: machine.Event) -> None:
        self.call_after(self.delay(), lambda: self.nodes[peer].handle(event))

    def kill(self, node: Node) -> None:
        node.is_alive = False
        for wire_ in list(self.wires.values()):
            if node in (wire_.upstream, wire_.downstream):
                self.close(wire_)

    def end(self) -> None:
        """End the last round of all nodes, and let all microbatches in flight end."""
        if self.is_followed:
            self.is_followed = False
            for node in self.nodes.values():
                node.end_round()
            self.run(4 * self.microbatch_seconds)
        for node in self.nodes.values():
            node.end_round()
        self.run(4 * self.microbatch_seconds)

    def kept(self) -> Counter[bytes]:
        """Return, for each microbatch by ticket, the number of stages that kept it; only live nodes count."""
        return Counter(ticket for node in self.nodes.values() if node.is_alive for ticket in node.kept)
