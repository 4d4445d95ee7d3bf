"""A trainer's memory on a GPU and on the host, counted by PyTorch on tensors without contents.

Models are made on the device "meta", whose tensors have sizes and nothing else, in `FakeTensorMode`, which does the
same for the host's tensors. `MemTracker` adds up live tensors. It cannot count the memory of CUDA's kernels, its
context and bf16 autocast.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from farandole.protocol.planning.needs import needs_of
from farandole.protocol.run.manifest import Manifest, ModelConfig
from farandole.protocol.trainer.trainer_messages import TrainerSettings
from farandole.training.base.device import Device
from farandole.training.data.batches import Batch, Batches
from farandole.training.engine.learner import Learner
from farandole.training.engine.replica import Recipe
from farandole.training.model.model import Transformer, language_loss

GPU: Final = torch.device("meta")
HOST: Final = torch.device("cpu")
_NO_DEVICE: Final = Device(GPU, None, "no device")


class Held(NamedTuple):
    """Bytes on one device."""

    between: int
    """Between two inner steps."""
    most: int
    """At the peak, activations included."""


class MeasuredLoop(NamedTuple):
    """A model in training."""

    inner_step: Callable[[], object]
    end_round: Callable[[], object] = lambda: None
    """The end of a round as far as it is on the GPU."""


class Way(NamedTuple):
    """A way to train a model: the run, and a member's own settings."""

    manifest: Manifest
    is_plain: bool = False
    """Whether it is a loop without a node."""
    averages_on_host: bool = True
    is_lean: bool = False
    recomputes: bool = False

    def start(self) -> MeasuredLoop:
        """Make the model."""
        module = _module_of(self.manifest.model)
        if self.is_plain:
            return plain_loop(self.manifest, module)
        learner = Learner(
            module,
            Recipe.of(self.manifest),
            _NoText(self.manifest.model.context),
            run_id=bytes(32),
            device=_NO_DEVICE,
            averages_on_host=self.averages_on_host,
            settings=TrainerSettings(lean=self.is_lean, recompute=self.recomputes),
        )
        return MeasuredLoop(learner.learn, learner.round_end.contribution)

    @property
    def planned(self) -> int | None:
        """Return the peak on a GPU that `farandole.protocol.planning.needs` computes; None for a plain loop."""
        if self.is_plain:
            return None
        needs = needs_of(self.manifest, recomputes=self.recomputes)
        own = needs.memory(has_gpu=True, averages_on_gpu=not self.averages_on_host, is_lean=self.is_lean)
        return own.device


class _NoText(Batches):
    """Batches of one sequence of zeros."""

    def __init__(self, context: int) -> None:
        super().__init__(np.zeros(0, np.int64), 1, context)

    def batch(self, step: int) -> Batch:
        """Return the same batch each time."""
        return np.zeros((1, self.context + 1), np.int64)


def plain_loop(manifest: Manifest, module: nn.Module) -> MeasuredLoop:
    """Return a plain training loop: `torch.optim.AdamW`, all gradients kept."""
    tokens = torch.zeros(1, manifest.model.context + 1, dtype=torch.long, device=GPU)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)

    def step() -> None:
        language_loss(module, tokens).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return MeasuredLoop(step)


@torch.no_grad()
def _module_of(model: ModelConfig) -> nn.Module:
    """Make a model on the device without contents."""
    with GPU:
        module = Transformer(model)
    # The module has its device already, and on "meta" `Module.to` cannot exchange parameters.
    module.to = lambda *_, **__: module  # type: ignore[method-assign]
    return module


def held_by(way: Way) -> dict[torch.device, Held]:
    """Return the memory held by a way of training, counted without a GPU."""
    with FakeTensorMode(), MemTracker() as tracker:
        loop = way.start()
        loop.inner_step()
        loop.end_round()
        tracker.reset_mod_stats()
        loop.inner_step()
        loop.end_round()
        gc.collect()
        now, peak = (tracker.get_tracker_snapshot(kind) for kind in ("current", "peak"))
    return {
        device: Held(*(int(snapshot.get(device, {}).get("Total", 0)) for snapshot in (now, peak)))
        for device in (GPU, HOST)
    }
