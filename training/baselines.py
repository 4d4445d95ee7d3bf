"""NoLoCo beside what it is measured against: many replicas in one process, on the same tokens, in lock-step.

All replicas live in the rows of (N, P) tensors. They are computed one by one: `torch.func.vmap` over them took as long
on a CPU. Inner steps, contributions and outer steps are a node's own (`farandole.training.inner`,
`farandole.training.outer_state`), so any outer rule can be compared.

Synchronous data parallel training is one replica with everybody's batches at once: the mean of the gradients of equal
batches is the gradient of their union. DiLoCo takes the mean over all replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from farandole.protocol.manifest import InnerConfig, ModelConfig
from farandole.protocol.outer_rules import Codec, DiLoCoConfig, NoLoCoConfig, OuterConfig

from .batches import draw
from .codec import bytes_to_read
from .contribution import Contribution
from .copying import Copier
from .data import Sampler
from .inner import FlatAdamW
from .model import build_model, language_loss
from .outer_state import OuterState
from .parameters import bind_, layout_of
from .topk import TopK

_NOLOCO = NoLoCoConfig()

Group = Literal["gradients", "all", "pairs", "none"]


@dataclass(frozen=True, slots=True)
class Method:
    """A way to train many replicas."""

    name: str
    group: Group
    """What is averaged: everybody's gradients at every step; the weights of all, or of pairs, now and then; nothing."""
    interval: int = 10
    """Inner steps between outer steps."""
    outer: OuterConfig = _NOLOCO
    late: int = 0
    """Inner steps between what is sent and the outer step, at most ``interval``: the time that an exchange takes."""


def methods(interval: int = 10) -> tuple[Method, ...]:
    """Those that are compared."""

    def nesterov(codec: Codec = "fp32", topk: int = 64, fragments: int = 1) -> NoLoCoConfig:
        return NoLoCoConfig(momentum="nesterov", codec=codec, topk=topk, fragments=fragments)

    half = -(-interval // 2)
    # 70 of 256 elements take 144 bytes, as they do in int4.
    return (
        Method("synchronous data parallel", "gradients"),
        Method("DiLoCo", "all", interval, DiLoCoConfig(alpha=0.5, momentum="heavy_ball")),
        Method("NoLoCo, heavy ball, fp32", "pairs", interval),
        Method("NoLoCo, heavy ball, int8", "pairs", interval, NoLoCoConfig(codec="int8")),
        Method("NoLoCo, Nesterov, fp32", "pairs", interval, nesterov()),
        Method("NoLoCo, Nesterov, int8", "pairs", interval, nesterov("int8")),
        Method("NoLoCo, Nesterov, bf16", "pairs", interval, nesterov("bf16")),
        Method("NoLoCo, Nesterov, fp16", "pairs", interval, nesterov("fp16")),
        Method("NoLoCo, Nesterov, int4", "pairs", interval, nesterov("int4")),
        Method("NoLoCo, Nesterov, topk 70", "pairs", interval, nesterov("topk", topk=70)),
        Method("NoLoCo, Nesterov, topk 32", "pairs", interval, nesterov("topk", topk=32)),
        Method("NoLoCo, Nesterov, fp32, half a round late", "pairs", interval, nesterov(), half),
        Method("NoLoCo, Nesterov, int8, half a round late", "pairs", interval, nesterov("int8"), half),
        Method("NoLoCo, Nesterov, int8, a round late", "pairs", interval, nesterov("int8"), interval),
        Method("NoLoCo, Nesterov, int8, half of it", "pairs", interval, nesterov("int8", fragments=2)),
        Method("NoLoCo, Nesterov, int8, half of it twice as often", "pairs", half, nesterov("int8", fragments=2)),
        Method("nobody averages", "none"),
    )


class Ensemble:
    """``num_replicas`` replicas of one model that start alike, with one outer rule; all (N, P) fp32, on the CPU."""

    def __init__(
        self, model: ModelConfig, inner: InnerConfig, num_replicas: int, seed: int, outer: OuterConfig = _NOLOCO
    ) -> None:
        self.steps = 0
        self.modules = [build_model(model, seed) for _ in range(num_replicas)]
        start = torch.cat([parameter.detach().flatten() for parameter in self.modules[0].parameters()])
        self.theta = start.repeat(num_replicas, 1)
        self.gradient = torch.zeros_like(self.theta)
        self.layout = layout_of(self.modules[0], outer.codec)
        for row, module in enumerate(self.modules):
            bind_(module, self.layout, self.theta[row], self.gradient[row])
        self._optimizers = [
            FlatAdamW(inner, row, gradient, list(module.parameters()))
            for row, gradient, module in zip(self.theta, self.gradient, self.modules, strict=True)
        ]
        self._outer = [OuterState(outer, row, Copier()) for row in self.theta]
        self._sent: list[tuple[Contribution, bytearray]] = []

    @property
    def phi(self) -> Tensor:
        """A copy of the slow weights (N, P)."""
        return torch.stack([state.slow for state in self._outer])

    def inner_step(self, tokens: npt.NDArray[np.int64]) -> None:
        """One inner step of every replica on its batch; ``tokens`` (N, B, T + 1)."""
        self.gradient.zero_()
        for module, batch, optimizer in zip(self.modules, torch.from_numpy(tokens), self._optimizers, strict=True):
            language_loss(module, batch).backward()
            with torch.no_grad():
                optimizer.step(self.steps, 1)
        self.steps += 1

    @torch.no_grad()
    def contribute(self, fragment: int = 0) -> None:
        """Make every replica's contribution of a fragment, for the next `outer_step`."""
        self._sent = []
        for state in self._outer:
            made = state.contributor.freeze(self.layout.fragment(fragment, state.settings.fragments))
            encoded = bytearray(state.contributor.form.size(len(made.theta)))
            state.contributor.encode(made, encoded, lambda bytes_ready: None)
            self._sent.append((made, encoded))

    @torch.no_grad()
    def outer_step(self, groups: Sequence[Sequence[int]], *, is_late: bool = False) -> None:
        """The outer step of every replica with its group, all shares equal; ``groups`` is a partition of the rows.

        ``is_late``: inner steps were taken since `contribute`.
        """
        for rows in groups:
            shares = [1 / len(rows)] * len(rows) if len(rows) > 1 else []
            for row in rows:
                received = [self._received(row, other) for other in rows] if len(rows) > 1 else []
                self._outer[row].step(self._sent[row][0], received, shares, is_late=is_late)

    def _received(self, row: int, sender: int) -> Tensor:
        """A sender's contribution as a replica decodes it."""
        form, (made, encoded) = self._outer[row].contributor.form, self._sent[sender]
        if row == sender or not isinstance(form, TopK):
            return made.sent
        values = self._sent[row][0].sent.clone()  # what topk leaves out is one's own
        form.decode(bytes_to_read(np.frombuffer(encoded, dtype=np.uint8)), values)
        return values

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
    ensemble = Ensemble(model, inner, 1 if is_synchronous else len(samplers), seed, method.outer)
    for step in range(steps):
        batches = np.stack([sampler.batch(step) for sampler in samplers])  # (N, B, T + 1)
        ensemble.inner_step(batches.reshape(1, -1, batches.shape[-1]) if is_synchronous else batches)
        if exchange is not None and step == exchange.ends_at:
            ensemble.outer_step(exchange.groups, is_late=True)
        if (step + 1) % method.interval == 0 and method.group in ("all", "pairs"):
            groups = _groups(method.group, len(samplers), seed, step)
            ensemble.contribute(step // method.interval % method.outer.fragments)
            exchange = _Exchange(groups, step + late)
            if not late:
                ensemble.outer_step(groups)
        progress(step + 1)
    if exchange is not None and exchange.ends_at >= steps:  # the last one is waited for
        ensemble.outer_step(exchange.groups, is_late=True)
    return ensemble


@dataclass(frozen=True, slots=True)
class _Exchange:
    """What is on its way while the replicas train on."""

    groups: list[list[int]]
    ends_at: int
    """The inner step after which the outer step is taken."""


def _groups(group: Group, num_replicas: int, seed: int, step: int) -> list[list[int]]:
    """Everybody, or random pairs (a triple is never made: with an odd number one is alone)."""
    if group == "all":
        return [list(range(num_replicas))]
    places = draw(2**62, num_replicas, b"pairs", seed.to_bytes(8, "little"), step.to_bytes(8, "little"))
    order = [int(row) for row in np.argsort(places)]
    return [order[i : i + 2] for i in range(0, num_replicas, 2)]
