"""The mean of all replicas: its loss, and the replicas' spread. A model in stages is merged stage by stage."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from torch import Tensor

from farandole.protocol.run.manifest import Manifest
from farandole.protocol.run.rules import SLOW
from farandole.protocol.trainer.trainer_messages import TrainerSettings
from farandole.training.base.errors import CheckpointError
from farandole.training.base.parameters import Layout
from farandole.training.data.dataset import Bring
from farandole.training.engine.checkpoint import Counters, save_checkpoint
from farandole.training.engine.learner import Learner, build_learner

from .report import Merged

# 32 batches of the demo's 16 x 128 tokens measure the loss to about 0.01.
VALIDATION_BATCHES: Final = 32


def measuring_learner(manifest: Manifest, run_id: bytes, data: Sequence[str]) -> Learner:
    """Return a learner that measures, with the run's text or that in ``data``; this process computes on one thread."""
    torch.set_num_threads(1)
    settings, bring = TrainerSettings(device="cpu"), Bring(tuple(map(Path, data)))
    return build_learner(manifest, run_id=run_id, author=bytes(32), settings=settings, bring=bring)


def measure_merged(
    manifest: Manifest, run_id: bytes, checkpoints: Sequence[Path], out: Path, data: Sequence[str] = ()
) -> Merged:
    """Average the replicas' slow weights into a checkpoint at ``out`` and measure it on held-out text.

    Raises `TrainingError` if a checkpoint or the text is unusable, or if a stage has no checkpoint.
    """
    replica = measuring_learner(manifest, run_id, data)
    spread = merge_checkpoints(checkpoints, replica.checkpoint.layout, run_id, out)
    loss_start = replica.evaluate(VALIDATION_BATCHES)
    replica.checkpoint.load(out)
    loss = replica.evaluate(VALIDATION_BATCHES)
    bits_start, bits = (replica.bits_per_byte(each, VALIDATION_BATCHES) for each in (loss_start, loss))
    return Merged(loss_start, loss, spread, bits_start, bits)


def merge_checkpoints(checkpoints: Sequence[Path], layout: Layout, run_id: bytes, out: Path) -> float:
    """Write a checkpoint of the whole model with the mean of all slow weights; return the spread.

    The rest of each parameter's state comes from the first checkpoint that has it, and so do the counters. The spread
    is the mean over the weights of their standard deviation across replicas, over the mean weights' root mean square
    (as `farandole.testnet.methods.stacked.Stack.spreads`). Raises `CheckpointError` if a parameter is in no
    checkpoint.
    """
    holders: dict[str, list[Path]] = defaultdict(list)  # of each tensor
    for path in checkpoints:
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                holders[name].append(path)
    vectors = {vector: torch.empty(layout.num_elements) for vector in sorted({n.partition("/")[0] for n in holders})}
    merged: dict[str, Tensor] = {}
    deviation = squares = 0.0
    for vector, flat in vectors.items():
        for name, view in layout.views(flat).items():
            tensor = f"{vector}/{name}"
            if tensor not in holders:
                if vector == SLOW:
                    raise CheckpointError(f"no replica has saved {name}: nobody held its stage at the end")
                continue  # the inner optimizer keeps none for this parameter
            merged[tensor] = view
            if vector != SLOW:
                view.copy_(_tensor(holders[tensor][0], tensor))
                continue
            replicas = torch.stack([_tensor(path, tensor) for path in holders[tensor]])  # (replicas, ...)
            view.copy_(replicas.mean(0))
            deviation += float(replicas.std(0, correction=0).sum())
            squares += float(view.square().sum())
    with safe_open(checkpoints[0], framework="pt") as file:
        metadata = file.metadata()
    counters = Counters(*(int(metadata[name]) for name in ("round", "steps", "tokens")))
    save_checkpoint(out, merged, layout, run_id, counters)
    return deviation / layout.num_elements / math.sqrt(squares / layout.num_elements)


def _tensor(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor
