"""The methods that NoLoCo is compared with, and how often and what each of them averages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from farandole.protocol.run.manifest import InnerName
from farandole.protocol.run.rules import Codec, NoLoCoConfig, OuterConfig, PlainConfig, encoded_bytes
from farandole.protocol.wire.safetensors import FP32_BYTES
from farandole.training.data.dataset import Sampler
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
        case SparseLoCoConfig():
            return SparseLoCo(settings)
    return rule_of(settings)
