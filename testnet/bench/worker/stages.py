"""The parts of the benchmark of stages: the task of all variants, the whole model in one process, and a stage's node.

The node has only a daemon's parts for its stage: a libp2p host, bulk channels, the pipeline with its links, and the
trainer in its own process.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import torch
import torch.distributed as dist
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from farandole.node.base.bandwidth import Shaping
from farandole.node.base.nurseries import open_service_nursery
from farandole.node.base.system.tuning import TRAINING_NICENESS
from farandole.node.bulk.negotiation import open_bulk
from farandole.node.loop.pipeline_service import PipelineService, Worker
from farandole.node.mesh.host import open_host
from farandole.node.state.messenger import open_messenger
from farandole.node.trainer.trainer import open_trainer
from farandole.protocol.run.manifest import ModelConfig, manifest_from_dict
from farandole.protocol.run.models import layers_of
from farandole.protocol.trainer import trainer_messages as messages
from farandole.protocol.wire.identity import public_bytes
from farandole.training.base.device import choose_device
from farandole.training.data.dataset import build_sampler
from farandole.training.engine.learner import build_learner
from farandole.training.engine.replica import Replica
from farandole.training.model.model import Transformer, build_model, cross_entropy

from ..process import ANSWER_TIMEOUT

RUN_ID: Final = bytes(32)
# 3.6 M parameters: four stages of two layers, and microbatches that take some tens of milliseconds on a core.
MODEL: Final[Mapping[str, int]] = {
    "num_layers": 8,
    "width": 192,
    "num_heads": 6,
    "hidden": 576,
    "context": 128,
    "vocabulary": 256,
}
NUM_MICROBATCHES: Final = 16
# Low: in a run without a warm-up, activations could double from one inner step to the next, and would be refused.
LEARNING_RATE: Final = 1e-4
# Inner steps before the timed ones: shapes are inferred, links opened, pages mapped.
WARMUP_STEPS: Final = 1
# Nothing may be dropped, however busy the machine is, as losses are compared.
MICROBATCH_SECONDS: Final = 600.0


@dataclass(frozen=True, slots=True)
class Task:
    """Inner steps of a model, each of `NUM_MICROBATCHES` microbatches of one sequence."""

    num_stages: int = 4
    steps: int = 4
    """Number of timed inner steps."""
    model: Mapping[str, int] = field(default_factory=lambda: MODEL)

    @property
    def all_steps(self) -> int:
        """Return the number of inner steps, warm-up included."""
        return WARMUP_STEPS + self.steps

    def manifest(self, codec: str = "fp32", *, overlap: bool = False) -> dict[str, Any]:
        """Return the run's settings, as in a run file. Stages would clip separately, so clipping is off."""
        return {
            "name": "bench-stages",
            "model": {**self.model, "num_stages": self.num_stages},
            "inner": {
                "learning_rate": LEARNING_RATE,
                "warmup_steps": 2,
                "batch_size": NUM_MICROBATCHES,
                "clip": 0.0,
            },
            "pipeline": {
                "codec": codec,
                "microbatch_size": 1,
                "microbatch_seconds": MICROBATCH_SECONDS,
                "overlap": overlap,
            },
        }

    def sizes(self) -> ModelConfig:
        """Return the model to train; raises `ManifestError`."""
        return manifest_from_dict(self.manifest()).model


def key_of(stage: int) -> Ed25519PrivateKey:
    """Return the key of the node that holds a stage; stage 0's author chooses the data."""
    return Ed25519PrivateKey.from_private_bytes((stage + 1).to_bytes(32, "big"))


# All variants learn from its data.
AUTHOR: Final = public_bytes(key_of(0))


def learn_whole(manifest: dict[str, Any], steps: int, threads: int) -> dict[str, Any]:
    """Train the whole model alone, and sum the gradients of the same microbatches: the baseline for stages.

    Returns the time of each of the ``steps`` inner steps, and the mean loss of all.
    """
    os.nice(TRAINING_NICENESS)  # as trainers are
    torch.set_num_threads(threads)
    checked = manifest_from_dict(manifest)
    whole = msgspec.structs.replace(checked, model=msgspec.structs.replace(checked.model, num_stages=1))
    settings = messages.TrainerSettings(device="cpu", microbatch=checked.pipeline.microbatch_size)
    learner = build_learner(whole, run_id=RUN_ID, author=AUTHOR, settings=settings)
    stepped_at, losses = [], []
    for _ in range(steps):
        losses.append(float(learner.learn()))
        stepped_at.append(time.monotonic())
    return {"stepped_at": stepped_at, "loss": sum(losses) / len(losses)}


class StageNode:
    """One node: call `listen`, then `join`, then `learn`, once each."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def listen(self, manifest: dict[str, Any], stage: int) -> dict[str, Any]:
        """Start to listen, and return the node's addresses."""
        self._manifest, self._stage = manifest_from_dict(manifest), stage
        self._host = await self._stack.enter_async_context(open_host(key_of(stage), ["/ip4/127.0.0.1/tcp/0"]))
        messenger = await self._stack.enter_async_context(open_messenger(self._host))
        self._authors = [public_bytes(key_of(other)) for other in range(self._manifest.model.num_stages)]
        channels = await self._stack.enter_async_context(open_bulk(self._host, RUN_ID))
        rng = random.Random(stage)
        self._service = PipelineService(self._host, messenger, self._manifest, RUN_ID, Shaping(), channels, rng)
        self._service.set_nodes([frozenset({author}) for author in self._authors])
        nursery = await self._stack.enter_async_context(open_service_nursery())
        await nursery.start(self._service.run)
        return {"addresses": self._host.addresses}

    async def join(self, addresses: list[list[str]], folder: str) -> None:
        """Connect with the stages before this one, and prepare the trainer."""
        for other in range(self._stage):
            await self._host.connect(self._authors[other], addresses[other])
        command = messages.Prepare(
            run_id=RUN_ID,
            author=AUTHOR,
            manifest=msgspec.msgpack.encode(self._manifest),
            settings=messages.TrainerSettings(device="cpu", checkpoints=folder),
            stage=self._stage,
        )
        self._trainer = await self._stack.enter_async_context(open_trainer(command))

    async def learn(self, steps: int) -> dict[str, Any]:
        """Run a round of ``steps`` inner steps; return each one's time, and at stage 0 the mean loss."""
        memory = self._trainer.map_activations(self._manifest.pipeline.in_flight)
        queue, queued = trio.open_memory_channel[messages.Command](math.inf)

        async def write() -> None:
            async for command in queued:
                await self._trainer.send(command)

        with trio.fail_after(ANSWER_TIMEOUT):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(write)
                size = self._trainer.prepared.activation_bytes
                worker = Worker(self._stage, size, memory, queue.send_nowait)
                self._service.begin(worker)
                self._service.handle(messages.Train(0, steps))
                stepped_at: list[float] = []
                while not isinstance(report := await self._trainer.receive(), messages.Contributed):
                    if isinstance(report, messages.InnerStepTaken):
                        stepped_at.append(time.monotonic())
                    if isinstance(report, messages.InnerStepTaken | messages.Worked):
                        self._service.handle(report)
                nursery.cancel_scope.cancel()
        status = self._service.status()
        assert status is not None, "it has begun"
        if status.dropped:
            raise ConnectionError(f"{status.dropped} microbatches were dropped: {status.reasons}")
        return {"stepped_at": stepped_at, "loss": report.loss}


# One stage in `torch.distributed.pipelining` over gloo.
#
# Its stages are a line: the last one makes the logits. The head is the embedding, so the first and the last stage have
# a copy each, and sum their gradients before every step, as Megatron-LM does (arXiv 1909.08053). Both ends draw the
# tokens separately. The optimizer is a replica's, as in all variants.

SCHEDULES: Final = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
# A rank whose neighbour has failed notices it by its connection; this timeout is for one that hangs.
GLOO_TIMEOUT: Final = timedelta(seconds=120)
LOOPBACK: Final = "lo"


class LineStage(nn.Module):
    """A stage of the line: tokens (B, T) or (B, T, C) in; (B, T, C) out, or logits (B, T, V) at the end."""

    def __init__(self, stage: Transformer, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.stage = stage
        self._is_first = is_first
        self._is_last = is_last

    def forward(self, x: Tensor) -> Tensor:
        """Run this stage."""
        x = self.stage.advance(self.stage.embed(x) if self._is_first else x)
        return self.stage.logits(x) if self._is_last else x


def learn_stage(manifest: dict[str, Any], stage: int, schedule: str, steps: int, rendezvous: str) -> dict[str, Any]:
    """Take ``steps`` inner steps of one stage; return the time of each, and at the last stage the mean loss of all."""
    os.nice(TRAINING_NICENESS)  # as trainers are
    torch.set_num_threads(1)
    checked = manifest_from_dict(manifest)
    model, inner = checked.model, checked.inner
    is_first, is_last = stage == 0, stage == model.num_stages - 1
    if Path("/sys/class/net", LOOPBACK).exists():
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=stage,
        world_size=model.num_stages,
        timeout=GLOO_TIMEOUT,
    )
    ends = dist.new_group([0, model.num_stages - 1])
    module = LineStage(
        build_model(model, checked.seed, layers_of(model)[stage], has_ends=is_first or is_last),
        is_first=is_first,
        is_last=is_last,
    )
    replica = Replica(module, checked, run_id=RUN_ID, device=choose_device("cpu"))
    num_microbatches = inner.batch_size // checked.pipeline.microbatch_size
    line = PipelineStage(module, stage, model.num_stages, torch.device("cpu"))
    pipeline = SCHEDULES[schedule](line, num_microbatches, loss_fn=cross_entropy, scale_grads=False)
    sampler = build_sampler(checked, RUN_ID, AUTHOR) if is_first or is_last else None
    stepped_at: list[float] = []
    losses: list[Tensor] = []
    for step in range(steps):
        replica.gradient.zero_()
        tokens = None if sampler is None else torch.as_tensor(sampler.batch(step))  # (B, T + 1)
        inputs = [tokens[:, :-1]] if tokens is not None and is_first else []
        target = tokens[:, 1:].contiguous() if tokens is not None and is_last else None
        of_step: list[Tensor] = []
        pipeline.step(*inputs, target=target, losses=of_step if is_last else None, return_outputs=False)
        losses += of_step
        if is_first or is_last:
            dist.all_reduce(cast("Tensor", module.stage.embedding.weight.grad), group=ends)
        replica.inner_step(inner.batch_size * model.context, num_microbatches)
        stepped_at.append(time.monotonic())
    dist.destroy_process_group()
    loss = float(torch.stack(losses).detach().mean()) if losses else None
    return {"stepped_at": stepped_at, "loss": loss}
