"""The inner step of the race's other members, the same for each: a node's model, batches and learning-rate schedule."""

from __future__ import annotations

import torch
from torch import nn

from farandole.protocol.run.manifest import InnerConfig
from farandole.training.data.batches import Batches
from farandole.training.inner.optimizer import learning_rate
from farandole.training.model.model import language_loss


def take_step(
    module: nn.Module, optimizer: torch.optim.Optimizer, sampler: Batches, inner: InnerConfig, step: int
) -> None:
    """Take inner step number ``step``, on the sampler's batch of that number."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, inner)
    optimizer.zero_grad()
    language_loss(module, torch.as_tensor(sampler.batch(step))).backward()
    if inner.clip:
        torch.nn.utils.clip_grad_norm_(module.parameters(), inner.clip)
    optimizer.step()
