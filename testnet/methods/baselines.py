"""Compare NoLoCo with its baselines: many replicas in one process, on the same tokens, in lock-step.

All replicas are rows of (N, P) tensors. They are computed one by one: `torch.func.vmap` over them took as long on a
CPU. Inner steps, contributions and outer steps use the node's code (`farandole.training.inner.optimizer`,
`farandole.training.outer.outer_state`), so any outer rule can be compared.

Synchronous data parallel training is one replica that trains on the batches of all replicas at once: the mean of the
gradients of equal batches is the gradient of their union. DiLoCo takes the mean over all replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from farandole.protocol.run.manifest import InnerConfig, InnerName, ModelConfig
from farandole.protocol.run.rules import Codec, NoLoCoConfig, OuterConfig, PlainConfig, encoded_bytes
from farandole.protocol.wire.safetensors import FP32_BYTES
from farandole.training.base.parameters import bind_, layout_of
from farandole.training.data.batches import draw
from farandole.training.data.dataset import Sampler
from farandole.training.inner.optimizer import InnerOptimizer
from farandole.training.model.model import build_model, language_loss
from farandole.training.outer.codec import TopK, bytes_to_read
from farandole.training.outer.contribution import Contribution
from farandole.training.outer.copying import Copier
from farandole.training.outer.outer_state import OuterState
from farandole.training.outer.rule import OuterRule, rule_of

from .co2 import CO2, CO2Config
from .diloco import DiLoCo, DiLoCoConfig
from .gasloc import GASLoC, GASLoCConfig
from .sparseloco import SparseLoCo, SparseLoCoConfig

_NOLOCO = NoLoCoConfig()
# Elements, a multiple of all blocks, from which the bytes of one are computed.
_MANY: Final = 1 << 20

Group = Literal["gradients", "all", "pairs", "none"]


@dataclass(frozen=True, slots=True)
class Method:
    """A way to train many replicas."""

    name: str
    group: Group
    """What is averaged: all gradients at every step; the weights of all or of pairs at intervals; or nothing."""
    interval: int = 10
    """Inner steps between outer steps."""
    outer: OuterConfig = _NOLOCO
    late: int = 0
    """Inner steps between the contribution and the outer step, at most ``interval``: the duration of an exchange."""
    optimizer: InnerName = "adamw"
    """The inner optimizer."""
    rate: float = 1.0
    """Factor of the comparison's learning rate."""
    exchanges: int = 1
    """Outer steps at the end of a round, one right after another, each with another partner; 1 where ``late``."""

    @property
    def is_synchronous(self) -> bool:
        """Whether a single replica stands for all of them."""
        return self.group == "gradients"

    @property
    def traffic(self) -> float:
        """Bytes that a replica sends for each parameter and inner step.

        A mean over all is charged one vector, as a pair's is; a ring of N replicas sends 2 (N - 1) / N.
        """
        if self.group == "none":
            return 0.0
        if self.is_synchronous:
            return float(FP32_BYTES)
        outer = self.outer
        per_element = encoded_bytes(outer.codec, _MANY, outer.topk) / _MANY
        return per_element * self.exchanges / (self.interval * outer.fragments)


@dataclass(frozen=True, slots=True)
class Trial:
    """One training with a method."""

    seed: int
    rate: float
    """Factor of the learning rate."""
    samplers: Sequence[Sampler]
    """One for each replica; of a synchronous method's single replica, for each part of its batch."""


def methods(interval: int = 10) -> tuple[Method, ...]:
    """Return the methods that are compared.

    Those of int8 with an interval a quarter as long send as many bytes as fp32.
    """

    def nesterov(codec: Codec = "fp32", topk: int = 64, fragments: int = 1) -> NoLoCoConfig:
        return NoLoCoConfig(momentum="nesterov", codec=codec, topk=topk, fragments=fragments)

    half, quarter = -(-interval // 2), -(-interval // 4)
    plain = NoLoCoConfig(alpha=0.0, beta=1.0, gamma=1.0, codec="int8")
    # 70 of 256 elements take 144 bytes, as they do in int4.
    return (
        Method("synchronous data parallel", "gradients"),
        Method("synchronous data parallel, Muon", "gradients", optimizer="muon"),
        Method("DiLoCo", "all", interval, DiLoCoConfig()),
        Method("DiLoCo, alpha 0.5", "all", interval, DiLoCoConfig(alpha=0.5)),
        Method("DiLoCo, alpha 0.5, int8, four times as often", "all", quarter, DiLoCoConfig(alpha=0.5, codec="int8")),
        Method("DiLoCo, Muon, alpha 0.5", "all", interval, DiLoCoConfig(alpha=0.5), optimizer="muon"),
        Method("DiLoCo, heavy ball", "all", interval, DiLoCoConfig(alpha=0.5, momentum="heavy_ball")),
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
        Method("NoLoCo, plain, int8, four times as often", "pairs", quarter, plain),
        Method("NoLoCo, plain, int8, two partners, twice as often", "pairs", half, plain, exchanges=2),
        Method("NoLoCo, Muon, Nesterov, fp32", "pairs", interval, nesterov(), optimizer="muon"),
        Method("NoLoCo, Muon, plain, int8", "pairs", interval, plain, optimizer="muon"),
        *(
            Method(f"NoLoCo, Muon, plain, int8, {words}", "pairs", steps, plain, optimizer="muon", exchanges=exchanges)
            for words, steps, exchanges in (
                ("two partners", interval, 2),
                ("four partners", interval, 4),
                ("two partners, twice as often", half, 2),
                ("four partners, half as often", 2 * interval, 4),
            )
        ),
        Method("plain mean, fp32", "pairs", interval, PlainConfig()),
        Method("plain mean of all, fp32", "all", interval, PlainConfig()),
        Method("plain mean of all, Muon, fp32", "all", interval, PlainConfig(), optimizer="muon"),
        Method("GASLoC, fp32", "pairs", interval, GASLoCConfig()),
        Method("SparseLoCo, 8 of 256", "all", interval, SparseLoCoConfig()),
        Method("SparseLoCo, pairs, 8 of 256", "pairs", interval, SparseLoCoConfig()),
        Method("CO2, fp32, a round late", "pairs", interval, CO2Config(), interval),
        Method("CO2, no penalty, fp32, a round late", "pairs", interval, CO2Config(gap_penalty=1.0), interval),
        Method("nobody averages", "none"),
    )


def rule_for(settings: OuterConfig) -> OuterRule:
    """Return the outer rule of these settings, of a run's or of a method's own."""
    match settings:
        case CO2Config():
            return CO2(settings)
        case DiLoCoConfig():
            return DiLoCo(settings)
        case GASLoCConfig():
            return GASLoC(settings)
    return rule_of(settings)


class OuterReplica:
    """The outer state of one replica, whose fast weights are ``fast`` (n,), by the node's code.

    `farandole.testnet.methods.sparseloco.SparseLoCo` has the same methods, and its own state.
    """

    def __init__(self, settings: OuterConfig, fast: Tensor) -> None:
        self._state = OuterState(settings, fast, Copier(), rule=rule_for(settings))
        self._form = self._state.contributor.form
        self.slow = self._state.slow
        self._made: Contribution | None = None
        self._encoded = bytearray()

    def contribute(self, part: slice) -> None:
        """Make the contribution of a part of the parameters, for the next `step`."""
        self._made = self._state.contributor.freeze(part)
        self._encoded = bytearray(self._form.size(len(self._made.theta)))
        self._state.contributor.encode(self._made, self._encoded, lambda bytes_ready: None)

    @property
    def filling(self) -> Tensor:
        """What this replica takes for the elements that it does not receive (n,)."""
        assert self._made is not None, "it has contributed"
        return self._made.sent

    def decoded(self, filling: Tensor) -> Tensor:
        """Return the contribution as a replica with this ``filling`` decodes it (n,)."""
        if filling is self.filling or not isinstance(self._form, TopK):
            return self.filling
        values = filling.clone()
        self._form.decode(bytes_to_read(np.frombuffer(self._encoded, dtype=np.uint8)), values)
        return values

    def step(self, received: Sequence[Tensor], shares: Sequence[float], *, is_late: bool) -> None:
        """Take the outer step with the contributions of a group, its own among them; none: alone.

        ``is_late``: inner steps were taken since the contribution.
        """
        assert self._made is not None, "it has contributed"
        self._state.step(self._made, received, shares, is_late=is_late)


class Ensemble:
    """The replicas of one model in a trial, with equal initial weights and one outer rule; (N, P) fp32, on the CPU."""

    def __init__(self, method: Method, model: ModelConfig, inner: InnerConfig, trial: Trial) -> None:
        self.steps = 0
        outer, num_replicas = method.outer, 1 if method.is_synchronous else len(trial.samplers)
        rate = trial.rate * inner.learning_rate
        inner = msgspec.structs.replace(inner, optimizer=method.optimizer, learning_rate=rate)
        self.modules = [build_model(model, trial.seed) for _ in range(num_replicas)]
        start = torch.cat([parameter.detach().flatten() for parameter in self.modules[0].parameters()])
        self.theta = start.repeat(num_replicas, 1)
        self.gradient = torch.zeros_like(self.theta)
        self.layout = layout_of(self.modules[0], outer.codec)
        for row, module in enumerate(self.modules):
            bind_(module, self.layout, self.theta[row], self.gradient[row])
        self._fragments = outer.fragments
        self._outer: list[OuterReplica | SparseLoCo] = [
            SparseLoCo(outer, row) if isinstance(outer, SparseLoCoConfig) else OuterReplica(outer, row)
            for row in self.theta
        ]
        self._optimizers = [
            InnerOptimizer(inner, module, self.layout, row, gradient)
            for row, gradient, module in zip(self.theta, self.gradient, self.modules, strict=True)
        ]

    @property
    def phi(self) -> Tensor:
        """Return a copy of the slow weights (N, P)."""
        return torch.stack([state.slow for state in self._outer])

    def inner_step(self, tokens: npt.NDArray[np.int64]) -> None:
        """Take one inner step of every replica on its batch; ``tokens`` (N, B, T + 1)."""
        self.gradient.zero_()
        for module, batch, optimizer in zip(self.modules, torch.from_numpy(tokens), self._optimizers, strict=True):
            language_loss(module, batch).backward()
            with torch.no_grad():
                optimizer.step(self.steps, 1)
        self.steps += 1

    @torch.no_grad()
    def contribute(self, fragment: int = 0) -> None:
        """Make every replica's contribution of a fragment, for the next `outer_step`."""
        for replica in self._outer:
            replica.contribute(self.layout.fragment(fragment, self._fragments))

    @torch.no_grad()
    def outer_step(self, groups: Sequence[Sequence[int]], *, is_late: bool = False) -> None:
        """Take the outer step of every replica with its group, with equal shares; ``groups`` partitions the rows.

        ``is_late``: inner steps were taken since `contribute`.
        """
        for rows in groups:
            shares = [1 / len(rows)] * len(rows) if len(rows) > 1 else []
            for row in rows:
                replica = self._outer[row]
                received = [self._outer[other].decoded(replica.filling) for other in rows] if shares else []
                replica.step(received, shares, is_late=is_late)

    @torch.no_grad()
    def losses(self, batches: Sequence[npt.NDArray[np.int64]]) -> list[float]:
        """Return the trial's loss; see `Trainee`."""
        every = [language_loss(module, torch.from_numpy(each)) for module in self.modules for each in batches]
        return [float(torch.stack(every).mean())]

    @torch.no_grad()
    def merge(self) -> None:
        """Set every replica to the mean of all replicas."""
        self.theta.copy_(self.theta.mean(0, keepdim=True).expand_as(self.theta))

    def spreads(self) -> list[float]:
        """Return the trial's spread: the weights' mean standard deviation across replicas, over their mean size."""
        deviation = self.theta.std(0, correction=0).mean()
        return [float(deviation / self.theta.mean(0).square().mean().sqrt())]


class Trainee(Protocol):
    """What `train` trains: an `Ensemble`, or several as one (`farandole.testnet.methods.stacked`)."""

    def inner_step(self, tokens: npt.NDArray[np.int64]) -> None:
        """Take one inner step of every replica on its batch; ``tokens`` (N, B, T + 1)."""

    def contribute(self, fragment: int = 0) -> None:
        """Make every replica's contribution of a fragment."""

    def outer_step(self, groups: Sequence[Sequence[int]], *, is_late: bool = False) -> None:
        """Take the outer step of every replica with its group."""

    def losses(self, batches: Sequence[npt.NDArray[np.int64]]) -> list[float]:
        """Return each trial's loss, the mean over its replicas and the batches, each (B, T + 1)."""

    def merge(self) -> None:
        """Set every replica to the mean of its trial's replicas."""

    def spreads(self) -> list[float]:
        """Return each trial's standard deviation of weights across replicas, over the weights' root mean square."""


def train(
    method: Method,
    trainee: Trainee,
    trials: Sequence[Trial],
    steps: int,
    progress: Callable[[int], None] = lambda step: None,
) -> None:
    """Take ``steps`` inner steps and a method's outer steps; ``progress`` gets the number of steps after each.

    All trials have equally many samplers. A synchronous method's single replica trains on the batches of all of them.
    The last inner step ends a round, however short: otherwise the methods would be compared at different distances
    from an outer step.
    """
    num_samplers = len(trials[0].samplers)

    def batches(step: int) -> npt.NDArray[np.int64]:
        tokens = np.stack([sampler.batch(step) for trial in trials for sampler in trial.samplers])  # (N, B, T + 1)
        return tokens.reshape(len(trials), -1, tokens.shape[-1]) if method.is_synchronous else tokens

    def groups(step: int, exchange: int) -> list[list[int]]:
        return [
            [number * num_samplers + row for row in group]
            for number, trial in enumerate(trials)
            for group in groups_of(method.group, num_samplers, trial.seed, step, exchange)
        ]

    awaited: list[list[int]] | None = None  # the groups of an exchange that goes on while the replicas train
    takes_at = 0  # the inner step after which its outer step is taken
    for step in range(steps):
        trainee.inner_step(batches(step))
        is_last = step + 1 == steps
        if awaited is not None and (step == takes_at or is_last):
            trainee.outer_step(awaited, is_late=True)
            awaited = None
        if method.group in ("all", "pairs") and ((step + 1) % method.interval == 0 or is_last):
            for exchange in range(method.exchanges):
                trainee.contribute(step // method.interval % method.outer.fragments)
                if method.late and not is_last:
                    awaited, takes_at = groups(step, exchange), step + method.late
                else:
                    trainee.outer_step(groups(step, exchange))
        progress(step + 1)


def groups_of(group: Group, num_replicas: int, seed: int, step: int, exchange: int = 0) -> list[list[int]]:
    """Return one group of all replicas, or random pairs; with an odd number of replicas, one is alone."""
    if group == "all":
        return [list(range(num_replicas))]
    number = step | exchange << 32
    places = draw(2**62, num_replicas, b"pairs", seed.to_bytes(8, "little"), number.to_bytes(8, "little"))
    order = [int(row) for row in np.argsort(places)]
    return [order[i : i + 2] for i in range(0, num_replicas, 2)]
