"""The whole model in one process, which sums the gradients of the same microbatches: the baseline for stages."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from farandole.node.base.system.tuning import TRAINING_NICENESS
from farandole.protocol.run.manifest import manifest_from_dict
from farandole.training.base.device import choose_device
from farandole.training.data.dataset import build_sampler
from farandole.training.engine.replica import Recipe, Replica
from farandole.training.model.model import build_model, language_loss

from .server import Server
from .stages_task import RUN_ID, author


class Alone:
    """Trains the whole model alone."""

    def __init__(self, server: Server) -> None:
        os.nice(TRAINING_NICENESS)  # as trainers are

    def learn(self, manifest: dict[str, Any], steps: int, threads: int) -> dict[str, Any]:
        """Take ``steps`` inner steps; return the time of each, and the mean loss of all."""
        torch.set_num_threads(threads)
        checked = manifest_from_dict(manifest)
        model, inner = checked.model, checked.inner
        sampler = build_sampler(checked, RUN_ID, author())
        module = build_model(model, checked.seed)
        replica = Replica(module, Recipe.of(checked), run_id=RUN_ID, device=choose_device("cpu"))
        stepped_at, losses = [], []
        for step in range(steps):
            microbatches = torch.split(torch.as_tensor(sampler.batch(step)), checked.pipeline.microbatch_size)
            replica.clear_gradient()
            for tokens in microbatches:  # (b, T + 1)
                loss = language_loss(module, tokens)
                loss.backward()
                losses.append(float(loss.detach()))
            replica.inner_step(inner.batch_size * model.context, len(microbatches))
            stepped_at.append(time.monotonic())
        return {"stepped_at": stepped_at, "loss": sum(losses) / len(losses)}
