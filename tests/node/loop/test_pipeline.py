"""A model in stages over real hosts, links and trainer processes learns as the whole model does."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import load_file

from farandole.node.base.bandwidth import Shaping
from farandole.node.bulk.negotiation import open_bulk
from farandole.node.loop.pipeline_service import ACTIVATIONS_PROTOCOL, PipelineService, Worker
from farandole.node.mesh.host import Host, open_host
from farandole.node.state.messenger import open_messenger
from farandole.node.store.folder import CheckpointFolder
from farandole.node.trainer.trainer import Trainer, open_trainer
from farandole.protocol.run.manifest import Manifest
from farandole.protocol.stages.activations import Hello, Link, shape_hash
from farandole.protocol.trainer import trainer_messages as messages
from farandole.protocol.trainer.trainer_messages import TrainerSettings
from farandole.protocol.wire.identity import public_bytes
from farandole.training.data.dataset import Bring
from farandole.training.engine.learner import build_learner

from ...patience import PATIENCE
from ..hosts import LOOPBACK
from ..small_runs import TINY, small_manifest
from ..trainer_commands import prepare_for

STEPS = 8
NUM_HELD_OUT = 2  # batches, which are microbatches here
Values = npt.NDArray[np.float32]
RUN_ID = b"r" * 32


def manifest_of(num_stages: int, context: int = 16, width: int = 16, **pipeline: str) -> Manifest:
    return small_manifest(
        model=TINY | {"num_layers": 4, "width": width, "context": context, "num_stages": num_stages},
        inner={"learning_rate": 3e-3, "warmup_steps": 2, "batch_size": 4, "clip": 0.0, "deterministic": True},
        rounds={},
        pipeline={"codec": "fp32", "microbatch_size": 4, "in_flight": 4, **pipeline},
        data={"source": "text", "held_out": 0.2},
    )


@dataclass
class Node:
    host: Host
    service: PipelineService
    trainer: Trainer
    reports: list[messages.Report] = field(default_factory=list)
    contributed: trio.Event = field(default_factory=trio.Event)
    saved: trio.Event = field(default_factory=trio.Event)
    has_used_channels: bool = False

    async def run(self, manifest: Manifest, stage: int, steps: int = STEPS) -> None:
        queue, queued = trio.open_memory_channel[messages.Command](math.inf)
        tell = queue.send_nowait

        async def write() -> None:
            async for command in queued:
                await self.trainer.send(command)

        async with trio.open_nursery() as nursery:
            await nursery.start(self.service.run)
            nursery.start_soon(write)
            memory = self.trainer.map_activations(manifest.pipeline.in_flight)
            size = self.trainer.prepared.activation_bytes
            worker = Worker(stage, size, memory, tell)
            self.service.begin(worker)
            if stage == 0:
                self.service.handle(messages.Validate(NUM_HELD_OUT))
            self.service.handle(messages.Train(0, steps))
            while not self.saved.is_set():
                report = await self.trainer.receive()
                self.reports.append(report)
                match report:
                    case messages.Worked(problem, is_outlier):
                        assert is_outlier or problem == ""
                        self.service.handle(report)
                    case messages.InnerStepTaken(is_taken):
                        assert is_taken
                        links = self.service.links.values()
                        self.has_used_channels |= any(link.link.pipe.channel is not None for link in links)
                        self.service.handle(report)
                    case messages.Encoded():
                        tell(messages.TakeOuterStep(0))
                        tell(messages.Save())
                    case messages.Saved():
                        self.saved.set()
            self.service.end()
            nursery.cancel_scope.cancel()

    @property
    def loss(self) -> float | None:
        (loss,) = [report.loss for report in self.reports if isinstance(report, messages.Contributed)]
        return loss


@contextlib.asynccontextmanager
async def open_nodes(manifest: Manifest, folder: Path, *, with_channels: bool = False) -> AsyncIterator[list[Node]]:
    """Open one node for each stage of the model, connected with each other; the trainers are ready."""
    folder.joinpath("texts").mkdir()
    for number in range(20):
        folder.joinpath("texts", f"{number}.txt").write_text(f"text {number}, which goes on and on; " * 100)
    async with contextlib.AsyncExitStack() as stack:
        nodes: list[Node] = []
        authors: list[bytes] = []
        for stage in range(manifest.model.num_stages):
            key = Ed25519PrivateKey.from_private_bytes(bytes([stage + 1]) * 32)
            authors.append(public_bytes(key))
            host = await stack.enter_async_context(open_host(key, LOOPBACK))
            messenger = await stack.enter_async_context(open_messenger(host))
            for other in nodes:
                await host.connect(other.host.author, other.host.addresses)
            channels = await stack.enter_async_context(open_bulk(host, RUN_ID)) if with_channels else None
            rng = random.Random(stage)
            service = PipelineService(host, messenger, manifest, RUN_ID, Shaping(), channels, rng)
            data = [str(folder / "texts")]
            command = prepare_for(manifest, folder, run_id=RUN_ID, author=authors[-1], data=data, stage=stage)
            trainer = await stack.enter_async_context(open_trainer(command))
            nodes.append(Node(host, service, trainer))
        for node in nodes:
            node.service.set_nodes([frozenset({author}) for author in authors])
        yield nodes


@pytest.mark.parametrize(("num_stages", "is_bulk"), [(4, False), (2, True)])
async def test_nodes_of_one_stage_each_learn_what_one_learns(tmp_path: Path, num_stages: int, is_bulk: bool) -> None:
    manifest = manifest_of(num_stages, 1_024, 64) if is_bulk else manifest_of(num_stages)
    steps = 4 if is_bulk else STEPS
    with trio.fail_after(PATIENCE):
        async with open_nodes(manifest, tmp_path, with_channels=is_bulk) as nodes:
            async with trio.open_nursery() as nursery:
                for stage, node in enumerate(nodes):
                    nursery.start_soon(node.run, manifest, stage, steps)
            assert [node.has_used_channels for node in nodes] == [is_bulk] * num_stages
            author = nodes[0].host.author
            loss = nodes[0].loss
            (validated,) = (report for report in nodes[0].reports if isinstance(report, messages.Validated))
            parameters = [node.trainer.prepared.num_parameters for node in nodes]

    alone = build_learner(
        manifest,
        run_id=RUN_ID,
        author=author,
        settings=TrainerSettings(device="cpu"),
        bring=Bring((tmp_path / "texts",)),
    )
    assert validated.loss == pytest.approx(alone.evaluate(NUM_HELD_OUT), rel=1e-6)
    assert validated.bits_per_byte == pytest.approx(validated.loss / math.log(2)), "a token is a byte"
    losses = [float(alone.learn()) for _ in range(steps)]
    assert loss == pytest.approx(sum(losses) / steps, rel=1e-6)
    assert sum(parameters) == alone.checkpoint.layout.num_elements
    assert max(parameters) < alone.checkpoint.layout.num_elements
    alone.round_end.apply(None)
    slow = alone.checkpoint.layout.views(alone.round_end.outer.slow.clone())
    learnt = {
        name.removeprefix("slow/"): tensor
        for stage in range(num_stages)
        for name, tensor in load_file(CheckpointFolder(tmp_path, stage).file(1)).items()
        if name.startswith("slow/")
    }
    assert learnt.keys() == slow.keys()
    assert all(torch.equal(learnt[name], slow[name]) for name in slow)


async def test_gradients_travel_between_nodes_in_fewer_bytes_than_activations(tmp_path: Path) -> None:
    manifest = manifest_of(2, gradient_codec="int4")
    with trio.fail_after(PATIENCE):
        async with open_nodes(manifest, tmp_path) as nodes, trio.open_nursery() as nursery:
            for stage, node in enumerate(nodes):
                nursery.start_soon(node.run, manifest, stage, 1)
    counts = [node.service.counts for node in nodes]
    assert [(each.kept, each.dropped, each.refused) for each in counts] == [(1, 0, 0)] * 2
    texts = Bring((tmp_path / "texts",))
    author, settings = nodes[0].host.author, TrainerSettings(device="cpu")
    alone = build_learner(manifest, run_id=RUN_ID, author=author, settings=settings, bring=texts)
    assert nodes[0].loss == pytest.approx(float(alone.learn()), rel=1e-6), "the way there is exact"


async def test_strangers_and_what_is_of_another_shape_are_turned_away(tmp_path: Path) -> None:
    manifest = manifest_of(2)
    with trio.fail_after(PATIENCE):
        async with open_nodes(manifest, tmp_path) as nodes, trio.open_nursery() as nursery:
            nursery.start_soon(nodes[1].run, manifest, 1)
            mallory = Ed25519PrivateKey.from_private_bytes(b"m" * 32)
            async with open_host(mallory, ["/ip4/127.0.0.1/tcp/0"]) as stranger:
                await stranger.connect(nodes[1].host.author, nodes[1].host.addresses)
                stream = await stranger.open_stream(nodes[1].host.author, ACTIVATIONS_PROTOCOL)
                assert await stream.receive_some() == b""
            for hello in (
                Hello(RUN_ID, 0, shape_hash(manifest)),  # to another stage
                Hello(b"x" * 32, 1, shape_hash(manifest)),  # of another run
                Hello(RUN_ID, 1, b"x" * 32),  # other shapes, or another codec
            ):
                neighbour = await nodes[0].host.open_stream(nodes[1].host.author, ACTIVATIONS_PROTOCOL)
                await neighbour.send_all(Link(True, hello, (1, 1)).send(hello))
                assert await neighbour.receive_some() == b""
            status = nodes[1].service.status()
            assert status is not None
            assert status.in_flight == 0
            nursery.cancel_scope.cancel()
