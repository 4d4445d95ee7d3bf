"""The methods that NoLoCo is compared with, and how often and what each of them averages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final, Literal

from msgspec.structs import replace as replaced

from farandole.protocol.run.manifest import InnerName
from farandole.protocol.run.rules import Codec, NoLoCoConfig, OuterConfig, PlainConfig, encoded_bytes
from farandole.protocol.wire.safetensors import FP32_BYTES
from farandole.training.data.dataset import Sampler
from farandole.training.outer.rule import OuterRule, rule_of

from .co2 import CO2, CO2Config
from .diloco import TWO_BITS_BYTES, DiLoCo, DiLoCoConfig
from .gasloc import GASLoC, GASLoCConfig
from .sparseloco import FEW_BYTES, SparseLoCo, SparseLoCoConfig

_NOLOCO = NoLoCoConfig()
_PLAIN: Final = NoLoCoConfig(alpha=0.0, beta=1.0, gamma=1.0, codec="int8")
# Shares of Muon's momentum that every method with Muon is compared at: it is worth as much as the methods' differences.
MUON_SHARES: Final = (0.9, 0.95)
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
    """Outer steps at the end of a round, one right after another, each of the next fragment and with another partner;
    1 where ``late``."""
    share: float = 0.95
    """Share of Muon's momentum that an inner step keeps."""
    momentum_codec: Codec | None = None
    """How Muon's momentum travels; None: it stays. Where ``late``, it is as late."""
    momentum_partners: int = 1
    """Partners a round that momentum is averaged with, one after another; where ``late``, the one of the weights."""

    @property
    def is_synchronous(self) -> bool:
        """Whether a single replica stands for all of them."""
        return self.group == "gradients"

    def traffic(self, momenta: float = 1.0) -> float:
        """Return the bytes that a replica sends for each parameter and inner step.

        ``momenta``: the parameters that Muon steps, as a share of all. A mean over all is charged one vector, as a
        pair's is; `ring_traffic` is what it sends.
        """
        if self.group == "none":
            return 0.0
        if self.is_synchronous:
            return float(FP32_BYTES)
        outer = self.outer
        if isinstance(outer, DiLoCoConfig) and outer.two_bits:
            per_element = TWO_BITS_BYTES
        elif isinstance(outer, SparseLoCoConfig):
            per_element = FEW_BYTES
        else:
            per_element = encoded_bytes(outer.codec, _MANY) / _MANY
        sent = per_element * self.exchanges / outer.fragments
        if self.momentum_codec is not None:
            sent += momenta * self.momentum_partners * encoded_bytes(self.momentum_codec, _MANY) / _MANY
        return sent / self.interval

    def ring_traffic(self, num_replicas: int, momenta: float = 1.0) -> float:
        """Return these bytes where a mean over all is a ring's all-reduce, of 2 (N - 1) / N vectors."""
        factor = 2 * (num_replicas - 1) / num_replicas if self.group in ("gradients", "all") else 1.0
        return factor * self.traffic(momenta)


@dataclass(frozen=True, slots=True)
class Trial:
    """One training with a method."""

    seed: int
    rate: float
    """Factor of the learning rate."""
    samplers: Sequence[Sampler]
    """One for each replica; of a synchronous method's single replica, for each part of its batch."""


def methods(interval: int = 10) -> tuple[Method, ...]:
    """Return the methods that are compared."""

    def nesterov(codec: Codec = "fp32", fragments: int = 1) -> NoLoCoConfig:
        return NoLoCoConfig(momentum="nesterov", codec=codec, fragments=fragments)

    half, quarter = -(-interval // 2), -(-interval // 4)
    with_feedback = DiLoCoConfig(learning_rate=1.0, alpha=0.0, codec="int4", error_feedback=True)
    return (
        Method("synchronous data parallel", "gradients"),
        Method("DiLoCo", "all", interval, DiLoCoConfig()),
        Method("DiLoCo, alpha 0.5", "all", interval, DiLoCoConfig(alpha=0.5)),
        Method("mean of all, fp32", "all", interval, PlainConfig()),
        Method("mean of all, int8, twice as often", "all", half, PlainConfig(codec="int8")),
        Method("mean of all, int8, four times as often", "all", quarter, PlainConfig(codec="int8")),
        Method("mean of all, int4 with error feedback, four times as often", "all", quarter, with_feedback),
        Method("NoLoCo, heavy ball, fp32", "pairs", interval),
        Method("NoLoCo, Nesterov, fp32", "pairs", interval, nesterov()),
        Method("NoLoCo, Nesterov, int8", "pairs", interval, nesterov("int8")),
        Method("NoLoCo, Nesterov, int4", "pairs", interval, nesterov("int4")),
        Method("NoLoCo, Nesterov, int8, half a round late", "pairs", interval, nesterov("int8"), half),
        Method("NoLoCo, Nesterov, int8, half of it twice as often", "pairs", half, nesterov("int8", fragments=2)),
        Method("NoLoCo, plain, int8, two partners, twice as often", "pairs", half, _PLAIN, exchanges=2),
        *(method for share in MUON_SHARES for method in _muon_methods(share, interval)),
        Method("GASLoC, fp32", "pairs", interval, GASLoCConfig()),
        Method("SparseLoCo, 8 of 256", "all", interval, SparseLoCoConfig()),
        Method("SparseLoCo, pairs, 8 of 256", "pairs", interval, SparseLoCoConfig()),
        Method("CO2, fp32, a round late", "pairs", interval, CO2Config(), interval),
        Method("CO2, no penalty, fp32, a round late", "pairs", interval, CO2Config(gap_penalty=1.0), interval),
        Method("nobody averages", "none"),
    )


def _muon_methods(share: float, interval: int) -> list[Method]:
    """Return the methods with Muon, whose momentum keeps ``share``."""
    half, two_thirds = -(-interval // 2), -(-2 * interval // 3)
    released = DiLoCoConfig(learning_rate=0.8, alpha=0.9, error_feedback=True, two_bits=True)
    int8 = PlainConfig(codec="int8")
    of_share = (
        Method("synchronous data parallel", "gradients"),
        Method("MuLoCo, alpha 0.5, fp32", "all", interval, DiLoCoConfig(alpha=0.5)),
        Method("MuLoCo, alpha 0.9, 2 bits with error feedback", "all", -(-5 * interval // 2), released),
        Method("MuLoCo, alpha 0.9, 2 bits with error feedback, five times as often", "all", half, released),
        Method("mean of all, int8, twice as often", "all", half, int8),
        Method("mean of all, int8, 3 times in 2 rounds, momentum", "all", two_thirds, int8, momentum_codec="int4"),
        Method("NoLoCo, int8, two partners", "pairs", interval, _PLAIN, exchanges=2),
        Method("NoLoCo, int8, two partners, twice as often", "pairs", half, _PLAIN, exchanges=2),
        _with_momentum("NoLoCo, int8, one partner, twice as often, momentum", half, fragments=1),
        _with_momentum("NoLoCo, int8, 8 fragments, twice as often, momentum", half),
    )
    return [replace(each, name=f"{each.name}, Muon {share:g}", optimizer="muon", share=share) for each in of_share]


def searched(interval: int) -> Iterator[Method]:
    """Yield ways with Muon to spend the bytes of one vector in fp32 every ``interval`` steps: what a search tries.

    A mean of all spends a ring's among eight, with error feedback. Four fifths of the parameters are matrices.
    """
    codecs: tuple[Codec, ...] = ("int8", "int4")
    tried = list[Method]()
    for codec, partners, parts, momenta, late in product(codecs, (1, 2), (1, 8), (0, 1, 2), (0, 1)):
        name = f"pairs, {codec}, {partners} a part of {parts}, momentum to {momenta}{', half a round late' * late}"
        outer: OuterConfig = replaced(_PLAIN, codec=codec, fragments=parts)
        if not late or partners == parts == 1 >= momenta:
            tried.append(
                Method(name, "pairs", 1, outer, late, "muon", 1.0, partners * parts, momentum_partners=momenta)
            )
    for codec, alpha, momenta in product(codecs, (0.0, 0.5), (0, 1)):
        outer = DiLoCoConfig(learning_rate=0.7 if alpha else 1.0, alpha=alpha, codec=codec, error_feedback=True)
        name = f"all, alpha {alpha:g}, {codec}, momentum to {momenta}"
        tried.append(Method(name, "all", 1, outer, optimizer="muon", momentum_partners=momenta))
    for each, share in product(tried, MUON_SHARES):
        method = replace(each, share=share, momentum_codec="int4" if each.momentum_partners else None)
        often = max(1, round(method.ring_traffic(8, 0.8) * interval / FP32_BYTES))
        name = f"search, {each.name}, every {often}, Muon {share:g}"
        yield replace(method, name=name, interval=often, late=each.late * -(-often // 2))


def _with_momentum(name: str, interval: int, fragments: int = 8) -> Method:
    """Return pairs that meet once for each fragment, and twice for their momentum in int4."""
    outer = replaced(_PLAIN, fragments=fragments)
    return Method(name, "pairs", interval, outer, exchanges=fragments, momentum_codec="int4", momentum_partners=2)


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
