"""NoLoCo beside what it is measured against: many replicas in one process, on the same tokens, in lock-step.

All replicas live in the rows of (N, P) tensors, and every optimizer here is elementwise, so one call steps them all.
Forward and backward passes go replica by replica: `torch.func.vmap` over the replicas took as long on a CPU.

Synchronous data parallel training is one replica with everybody's batches at once: the mean of the gradients of equal
batches is the gradient of their union. DiLoCo (arXiv 2311.08105) is the outer step with the mean over all replicas,
which share their slow weights, so that gamma's term vanishes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from farandole.protocol.manifest import InnerConfig, ModelConfig, OuterConfig

from . import noloco
from .batches import draw
from .codec import decode, encode, encoded_size
from .data import Sampler
from .inner import adamw_, learning_rate
from .model import build_model, language_loss
from .parameters import bind_, layout_of
from .topk import TopK

Group = Literal["gradients", "all", "pairs", "none"]


@dataclass(frozen=True, slots=True)
class Method:
    """A way to train many replicas."""

    name: str
    group: Group
    """What is averaged: everybody's gradients at every step; the weights of all, or of pairs, now and then; nothing."""
    interval: int = 10
    """Inner steps between outer steps."""
    outer: OuterConfig = field(default_factory=OuterConfig)
    late: int = 0
    """Inner steps between what is sent and the outer step, at most ``interval``: the time that an exchange takes."""


def methods(interval: int = 10) -> tuple[Method, ...]:
    """Those that are compared."""
    nesterov, int8 = OuterConfig(momentum="nesterov"), OuterConfig(codec="int8")
    nesterov_int8 = OuterConfig(momentum="nesterov", codec="int8")
    halves = OuterConfig(momentum="nesterov", codec="int8", fragments=2)
    half = -(-interval // 2)
    # 70 of 256 elements take 144 bytes, as they do in int4.
    return (
        Method("synchronous data parallel", "gradients"),
        Method("DiLoCo", "all", interval),
        Method("NoLoCo, heavy ball, fp32", "pairs", interval),
        Method("NoLoCo, heavy ball, int8", "pairs", interval, int8),
        Method("NoLoCo, Nesterov, fp32", "pairs", interval, nesterov),
        Method("NoLoCo, Nesterov, int8", "pairs", interval, nesterov_int8),
        Method("NoLoCo, Nesterov, bf16", "pairs", interval, OuterConfig(momentum="nesterov", codec="bf16")),
        Method("NoLoCo, Nesterov, fp16", "pairs", interval, OuterConfig(momentum="nesterov", codec="fp16")),
        Method("NoLoCo, Nesterov, int4", "pairs", interval, OuterConfig(momentum="nesterov", codec="int4")),
        Method("NoLoCo, Nesterov, topk 70", "pairs", interval, OuterConfig(momentum="nesterov", codec="topk", topk=70)),
        Method("NoLoCo, Nesterov, topk 32", "pairs", interval, OuterConfig(momentum="nesterov", codec="topk", topk=32)),
        Method("NoLoCo, Nesterov, fp32, half a round late", "pairs", interval, nesterov, half),
        Method("NoLoCo, Nesterov, int8, half a round late", "pairs", interval, nesterov_int8, half),
        Method("NoLoCo, Nesterov, int8, a round late", "pairs", interval, nesterov_int8, interval),
        Method("NoLoCo, Nesterov, int8, half of it", "pairs", interval, halves),
        Method("NoLoCo, Nesterov, int8, half of it twice as often", "pairs", half, halves),
        Method("nobody averages", "none"),
    )


class Ensemble:
    """``num_replicas`` replicas of one model that start alike; all (N, P) fp32, on the CPU."""

    def __init__(self, model: ModelConfig, inner: InnerConfig, num_replicas: int, seed: int) -> None:
        self.inner = inner
        self.steps = 0
        self.modules = [build_model(model, seed) for _ in range(num_replicas)]
        start = torch.cat([parameter.detach().flatten() for parameter in self.modules[0].parameters()])
        self.theta = start.repeat(num_replicas, 1)
        self.gradient = torch.zeros_like(self.theta)
        self.mean = torch.zeros_like(self.theta)
        self.square = torch.zeros_like(self.theta)
        self.phi = self.theta.clone()
        self.momentum = torch.zeros_like(self.theta)
        self.error = torch.zeros_like(self.theta)
        self.last: Tensor | None = None
        """What was last sent, by topk."""
        self.layout = layout_of(self.modules[0], "fp32")
        for row, module in enumerate(self.modules):
            bind_(module, self.layout, self.theta[row], self.gradient[row])

    def inner_step(self, tokens: npt.NDArray[np.int64]) -> None:
        """One AdamW step of every replica on its batch; ``tokens`` (N, B, T + 1). Without weight decay."""
        self.gradient.zero_()
        for module, batch in zip(self.modules, torch.from_numpy(tokens), strict=True):
            language_loss(module, batch).backward()
            if self.inner.clip:
                torch.nn.utils.clip_grad_norm_(module.parameters(), self.inner.clip)
        rate = learning_rate(self.steps, self.inner)
        adamw_(self.theta, self.gradient, self.mean, self.square, self.steps, rate, self.inner)
        self.steps += 1

    def outer_step(
        self,
        groups: Sequence[Sequence[int]],
        outer: OuterConfig,
        snapshot: Tensor | None = None,
        fragment: int = 0,
    ) -> None:
        """The outer step of every replica with the mean over its group; ``groups`` is a partition of the rows.

        ``snapshot`` (N, P) has the fast weights when they were sent, if inner steps were taken since. As in `Replica`.
        """
        part = self.layout.fragment(fragment, outer.fragments)
        theta, phi, error = self.theta[:, part], self.phi[:, part], self.error[:, part]
        frozen = theta if snapshot is None else snapshot[:, part]
        means = noloco.contribution(frozen, phi, outer).clone()
        meant = means + error if outer.feeds_errors_back else means.clone()
        if outer.codec == "topk" and self.last is None:
            self.last = noloco.contribution(self.phi, self.phi, outer).clone()  # as if all had sent it
        for rows in (list(group) for group in groups if len(group) > 1):
            if self.last is not None:
                last = self.last[:, part][rows]
                means[rows] = _means_of_topk(meant[rows], last, TopK(outer.topk))
                self.last[rows, part] = last
                continue
            sent = torch.stack([_as_sent(row, outer.codec) for row in meant[rows]])
            means[rows] = sent.mean(0)
            if outer.feeds_errors_back:
                error[rows] = meant[rows] - sent
        new_phi, self.momentum[:, part] = noloco.outer_step(phi, self.momentum[:, part], means, outer)
        phi.copy_(new_phi)
        if snapshot is None:
            theta.copy_(new_phi)
        else:
            theta.add_(new_phi - frozen)

    @torch.no_grad()
    def losses(self, batches: Sequence[npt.NDArray[np.int64]]) -> Tensor:
        """Mean loss of every replica over the same batches, each (B, T + 1); (N)."""
        return torch.stack(
            [torch.stack([language_loss(m, torch.from_numpy(b)) for b in batches]).mean() for m in self.modules]
        )

    @torch.no_grad()
    def merge(self) -> None:
        """Make every replica the mean of all."""
        self.theta.copy_(self.theta.mean(0, keepdim=True).expand_as(self.theta))

    def spread(self) -> float:
        """Mean over the weights of their standard deviation across replicas, over the weights' root mean square."""
        deviation = self.theta.std(0, correction=0).mean()
        return float(deviation / self.theta.mean(0).square().mean().sqrt())


def train(
    method: Method,
    model: ModelConfig,
    inner: InnerConfig,
    samplers: Sequence[Sampler],
    steps: int,
    seed: int,
    progress: Callable[[int], None] = lambda step: None,
) -> Ensemble:
    """Train one replica per sampler (one in all, for ``gradients``) for ``steps`` inner steps each."""
    is_synchronous, late = method.group == "gradients", method.late
    exchange: _Exchange | None = None
    ensemble = Ensemble(model, inner, 1 if is_synchronous else len(samplers), seed)
    for step in range(steps):
        batches = np.stack([sampler.batch(step) for sampler in samplers])  # (N, B, T + 1)
        ensemble.inner_step(batches.reshape(1, -1, batches.shape[-1]) if is_synchronous else batches)
        if exchange is not None and step == exchange.ends_at:
            ensemble.outer_step(exchange.groups, method.outer, exchange.snapshot, exchange.fragment)
        if (step + 1) % method.interval == 0 and method.group in ("all", "pairs"):
            groups = _groups(method.group, len(samplers), seed, step)
            fragment = step // method.interval % method.outer.fragments
            exchange = _Exchange(groups, ensemble.theta.clone(), fragment, step + late)
            if not late:
                ensemble.outer_step(groups, method.outer, fragment=fragment)
        progress(step + 1)
    if exchange is not None and exchange.ends_at >= steps:  # the last one is waited for
        ensemble.outer_step(exchange.groups, method.outer, exchange.snapshot, exchange.fragment)
    return ensemble


@dataclass(frozen=True, slots=True)
class _Exchange:
    """What is on its way while the replicas train on."""

    groups: list[list[int]]
    snapshot: Tensor
    fragment: int
    ends_at: int
    """The inner step after which the outer step is taken."""


def _groups(group: Group, num_replicas: int, seed: int, step: int) -> list[list[int]]:
    """Everybody, or random pairs (a triple is never made: with an odd number one is alone)."""
    if group == "all":
        return [list(range(num_replicas))]
    places = draw(2**62, num_replicas, b"pairs", seed.to_bytes(8, "little"), step.to_bytes(8, "little"))
    order = [int(row) for row in np.argsort(places)]
    return [order[i : i + 2] for i in range(0, num_replicas, 2)]


def _means_of_topk(values: Tensor, last: Tensor, form: TopK) -> Tensor:
    """The mean over a group as each of its members has it: (g, n) from what they mean and last sent, (g, n) each.

    Brings ``last`` up to date.
    """
    every = []
    for row, value in enumerate(values):
        data = torch.empty(form.size(len(value)), dtype=torch.uint8)
        form.encode(value, data, last[row])
        form.decode(data, last[row])
        every.append(data)
    means = []
    for row, value in enumerate(values):
        form.decode(every[row], sent := value.clone())
        received = [sent.clone() for _ in values]
        for data, theirs in zip(every, received, strict=True):
            form.decode(data, theirs)
        means.append(torch.stack(received).mean(0))
    return torch.stack(means)


def _as_sent(values: Tensor, codec: str) -> Tensor:
    """What a partner decodes of ``values``."""
    if codec == "fp32":
        return values
    buffer = bytearray(encoded_size(codec, values.numel()))
    encode(codec, values, buffer)
    return decode(codec, buffer, values.numel())
