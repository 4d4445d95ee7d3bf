"""The mean of all replicas: how good it is, and how far apart the replicas are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from farandole.node.conversion import training_configs
from farandole.protocol.manifest import Manifest
from farandole.training.learner import build_learner

from .report import Merged

# 32 batches of the demo's 16 x 128 tokens measure the loss to about 0.01.
VALIDATION_BATCHES: Final = 32
_SLOW: Final = "slow/"


def measure_merged(manifest: Manifest, run_id: bytes, checkpoints: Sequence[Path], out: Path) -> Merged:
    """Average the replicas' slow weights into a checkpoint at ``out`` and measure it on held-out text.

    Raises `TrainingError` if a checkpoint or the text will not do.
    """
    torch.set_num_threads(1)
    spread = merge_checkpoints(checkpoints, out)
    replica = build_learner(
        *training_configs(manifest), seed=manifest.seed, run_id=run_id, author=bytes(32), device="cpu"
    )
    loss_start = replica.validation_loss(VALIDATION_BATCHES)
    replica.load(out)
    return Merged(loss_start, replica.validation_loss(VALIDATION_BATCHES), spread)


def merge_checkpoints(checkpoints: Sequence[Path], out: Path) -> float:
    """Write the first checkpoint with the mean of all slow weights; returns the spread.

    The spread is the mean over the weights of their standard deviation across replicas, over the mean weights' root
    mean square (`farandole.training.baselines.Ensemble.spread`).
    """
    with safe_open(checkpoints[0], framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    deviation = squares = 0.0
    num_weights = 0
    for name in [name for name in tensors if name.startswith(_SLOW)]:
        replicas = torch.stack([_tensor(path, name) for path in checkpoints])  # (replicas, ...)
        mean = replicas.mean(0)
        deviation += float(replicas.std(0, correction=0).sum())
        squares += float(mean.square().sum())
        num_weights += mean.numel()
        tensors[name] = mean
    save_file(tensors, out, metadata=metadata)
    return deviation / num_weights / math.sqrt(squares / num_weights)


def _tensor(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor
