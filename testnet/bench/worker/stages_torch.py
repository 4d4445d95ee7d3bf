"""One stage in `torch.distributed.pipelining` over gloo.

Its stages are a line: the last one makes the logits. The head is the embedding, so the first and the last stage have a
copy each, and sum their gradients before every step, as Megatron-LM does (arXiv 1909.08053). Both ends draw the tokens
separately. The optimizer is a replica's, as in all variants.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from farandole.node.base.system.tuning import TRAINING_NICENESS
from farandole.protocol.run.manifest import ModelConfig, manifest_from_dict
from farandole.protocol.run.models import layers_of
from farandole.training.base.device import choose_device
from farandole.training.data.dataset import build_sampler
from farandole.training.engine.replica import Recipe, Replica
from farandole.training.model.model import Transformer, build_model, cross_entropy

from .server import Server
from .stages import RUN_ID, author

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


class TorchRank:
    """The process of one stage."""

    def __init__(self, server: Server) -> None:
        os.nice(TRAINING_NICENESS)  # as trainers are

    def learn(self, manifest: dict[str, Any], stage: int, schedule: str, steps: int, rendezvous: str) -> dict[str, Any]:
        """Take ``steps`` inner steps; return the time of each, and at the last stage the mean loss of all."""
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
        replica = Replica(module, Recipe.of(checked), run_id=RUN_ID, device=choose_device("cpu"))
        num_microbatches = inner.batch_size // checked.pipeline.microbatch_size
        line = PipelineStage(module, stage, model.num_stages, torch.device("cpu"))
        pipeline = SCHEDULES[schedule](line, num_microbatches, loss_fn=cross_entropy, scale_grads=False)
        sampler = build_sampler(checked, RUN_ID, author()) if is_first or is_last else None
        stepped_at: list[float] = []
        losses: list[Tensor] = []
        for step in range(steps):
            replica.clear_gradient()
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


def bytes_per_token(model: ModelConfig, tokens_per_step: int) -> float:
    """Return the bytes of all ranks, by the tensors' shapes, fp32: activations, gradients, and the ends' all-reduce."""
    hops = 2 * (model.num_stages - 1) * model.width
    tied = 2 * model.vocabulary * model.width / tokens_per_step
    return 4 * (hops + tied)
