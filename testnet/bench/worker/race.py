"""A member of DiLoCo with a barrier, over `torch.distributed` and gloo: the baseline of `bench race`.

    theta   <- inner steps of AdamW from phi
    delta   <- mean over all members of phi - theta        all-reduce, fp32
    m       <- 0.9 m + delta
    phi     <- phi - 0.7 (delta + 0.9 m)                   Nesterov (DiLoCo, arXiv 2311.08105, section 3.2)

The model, batches, optimizer and learning-rate schedule are a node's.
"""

from __future__ import annotations

import os
import time
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from farandole.node.base.system.tuning import TRAINING_NICENESS
from farandole.protocol.run.manifest import InnerConfig, Manifest, manifest_from_dict
from farandole.training.data.batches import Batches
from farandole.training.data.dataset import build_sampler
from farandole.training.inner.optimizer import learning_rate
from farandole.training.model.model import build_model, language_loss

OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
# A contribution takes some seconds on these lines; a member that is gone is not waited for (`race`).
GLOO_TIMEOUT: Final = timedelta(seconds=120)
RUN_ID: Final = bytes(32)
_MOMENTUM: Final = "momentum/"


def take_step(
    module: nn.Module, optimizer: torch.optim.Optimizer, sampler: Batches, inner: InnerConfig, step: int
) -> None:
    """Take inner step number ``step``, on the sampler's batch of that number; hivemind's members take it, too."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, inner)
    optimizer.zero_grad()
    language_loss(module, torch.as_tensor(sampler.batch(step))).backward()
    if inner.clip:
        torch.nn.utils.clip_grad_norm_(module.parameters(), inner.clip)
    optimizer.step()


class DiLoCoMember:
    """One member; its process runs in a home of its own."""

    def __init__(self, stack: AsyncExitStack) -> None:
        os.nice(TRAINING_NICENESS)  # as trainers are
        torch.set_num_threads(1)
        self._group = ""

    def begin(self, manifest: dict[str, Any], author: int, step_seconds: float) -> dict[str, Any]:
        """Build the model from the run's seed; ``author`` draws the batches."""
        checked: Manifest = manifest_from_dict(manifest)
        self._inner = checked.inner
        self._step_seconds = step_seconds
        self._module = build_model(checked.model, checked.seed)
        self._theta = dict(self._module.named_parameters())
        inner = checked.inner
        self._optimizer = torch.optim.AdamW(
            self._module.parameters(), inner.learning_rate, (inner.beta1, inner.beta2), weight_decay=inner.weight_decay
        )
        self._sampler = build_sampler(checked, RUN_ID, author.to_bytes(32, "little"))
        self._momentum = {name: torch.zeros_like(weight) for name, weight in self._theta.items()}
        self._phi = {name: weight.detach().clone() for name, weight in self._theta.items()}
        self._num_steps = 0
        return {}

    def load(self, path: str) -> dict[str, Any]:
        """Take over what another member has saved; the inner optimizer's means begin anew."""
        saved = load_file(path)
        for name, weight in self._theta.items():
            weight.data.copy_(saved[name])
            self._phi[name].copy_(saved[name])
            self._momentum[name].copy_(saved[_MOMENTUM + name])
        self._num_steps = int(saved["steps"])
        return {}

    def learn(self, steps: int) -> dict[str, Any]:
        """Take inner steps, each at least as long as this member's."""
        for _ in range(steps):
            began_at = time.monotonic()
            take_step(self._module, self._optimizer, self._sampler, self._inner, self._num_steps)
            self._num_steps += 1
            # The rest of the step of a slower machine: there is nothing to wait for but the time.
            time.sleep(max(0.0, self._step_seconds - (time.monotonic() - began_at)))
        return {}

    @torch.no_grad()
    def average(self, rank: int, world: int, group: str, device: str) -> dict[str, Any]:
        """Average with all members and take the outer step; another ``group`` has other members.

        ``group``: a file where its members meet; ``device``: the network interface.
        """
        if group != self._group:
            if self._group:
                dist.destroy_process_group()
            os.environ["GLOO_SOCKET_IFNAME"] = device
            dist.init_process_group(
                "gloo", init_method=f"file://{group}", rank=rank, world_size=world, timeout=GLOO_TIMEOUT
            )
            self._group = group
        delta = torch.cat([(self._phi[name] - weight).flatten() for name, weight in self._theta.items()])
        dist.all_reduce(delta)
        parts = delta.div_(world).split([weight.numel() for weight in self._theta.values()])
        for part, (name, weight) in zip(parts, self._theta.items(), strict=True):
            momentum, phi, mean = self._momentum[name], self._phi[name], part.view_as(weight)
            momentum.mul_(OUTER_MOMENTUM).add_(mean)
            phi.sub_(OUTER_RATE * (mean + OUTER_MOMENTUM * momentum))
            weight.data.copy_(phi)
        return {}

    def save(self, path: str) -> dict[str, Any]:
        """Save the weights, the momentum and the number of inner steps."""
        momentum = {_MOMENTUM + name: vector for name, vector in self._momentum.items()}
        partial = Path(path).with_suffix(".partial")
        save_file({**self._phi, **momentum, "steps": torch.tensor(self._num_steps)}, partial)
        partial.rename(path)
        return {}
