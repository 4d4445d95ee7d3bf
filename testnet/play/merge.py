"""The mean of all replicas: its loss, and the replicas' spread. A model in stages is merged stage by stage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from torch import Tensor

from farandole.protocol.run.manifest import Manifest
from farandole.protocol.run.rules import SLOW
from farandole.protocol.trainer.trainer_messages import TrainerSettings
from farandole.training.base.errors import CheckpointError
from farandole.training.data.dataset import Bring
from farandole.training.engine.learner import Learner, build_learner

from .report import Merged

# 32 batches of the demo's 16 x 128 tokens measure the loss to about 0.01.
VALIDATION_BATCHES: Final = 32
_SLOW: Final = f"{SLOW}/"


def measuring_learner(manifest: Manifest, run_id: bytes, data: Sequence[str] = ()) -> Learner:
    """Return a learner that measures, with the run's text or that in ``data``; this process computes on one thread."""
    torch.set_num_threads(1)
    settings, bring = TrainerSettings(device="cpu"), Bring(tuple(map(Path, data)))
    return build_learner(manifest, run_id=run_id, author=bytes(32), settings=settings, bring=bring)


def measure_merged(manifest: Manifest, run_id: bytes, checkpoints: Sequence[Path], data: Sequence[str] = ()) -> Merged:
    """Measure the mean of the replicas' slow weights on held-out text.

    Raises `TrainingError` if a checkpoint or the text is unusable, or if a stage has no checkpoint.
    """
    learner = measuring_learner(manifest, run_id, data)
    loss_start = learner.evaluate(VALIDATION_BATCHES)
    means, spread = mean_weights(checkpoints)
    loss = loss_of(learner, means)
    bits_start, bits = (learner.bits_per_byte(each, VALIDATION_BATCHES) for each in (loss_start, loss))
    return Merged(loss_start, loss, spread, bits_start, bits)


@torch.no_grad()
def loss_of(learner: Learner, weights: Mapping[str, Tensor]) -> float:
    """Return the loss of slow weights, named as in a checkpoint, on held-out text, in nats per token.

    Raises `CheckpointError` if a parameter is missing.
    """
    parameters = dict(learner.replica.module.named_parameters())
    for name in learner.checkpoint.layout.shapes:
        if (tensor := _SLOW + name) not in weights:
            raise CheckpointError(f"no replica has saved {name}: nobody held its stage at the end")
        parameters[name].copy_(weights[tensor])
    return learner.evaluate(VALIDATION_BATCHES)


def mean_weights(checkpoints: Sequence[Path]) -> tuple[dict[str, Tensor], float]:
    """Return the mean of the slow weights in the replicas' checkpoints, named as there, and their spread.

    The spread is the mean over the weights of their standard deviation across replicas, over the mean weights' root
    mean square (as `farandole.testnet.methods.stacked.Stack.spreads`).
    """
    means: dict[str, Tensor] = {}
    deviation = squares = 0.0
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, framework="pt")) for path in checkpoints]
        held = [(file, {name for name in set(file.keys()) if name.startswith(_SLOW)}) for file in files]
        for name in sorted(set().union(*(names for _, names in held))):
            replicas = torch.stack([file.get_tensor(name) for file, names in held if name in names])  # (replicas, ...)
            mean = means[name] = replicas.mean(0)
            deviation += float(replicas.std(0, correction=0).sum())
            squares += float(mean.square().sum())
    num_weights = sum(mean.numel() for mean in means.values())
    return means, deviation / num_weights / math.sqrt(squares / num_weights)
