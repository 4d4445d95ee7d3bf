"""Settings of the outer rules: the section ``[outer]`` of a run file.

An outer rule decides what replicas send to each other and how their slow weights move by what they receive. Its
settings are a struct here, which the manifest holds. Its mathematics is in the file of the same name in
`farandole.training.outer`: a rule of kind ``noloco`` has its settings in `NoLoCoConfig` and its code in
``training/outer/noloco.py``. To add one, write both, and name the struct in `OuterRules` at the end of this file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

Codec = Literal["fp32", "bf16", "fp16", "int8", "int4", "topk"]
Momentum = Literal["heavy_ball", "nesterov"]

_Positive = Annotated[float, msgspec.Meta(gt=0)]
_UnitInterval = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class OuterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings that every outer rule has: how contributions travel. Base class of the rules' settings."""

    codec: Codec = "fp32"
    """How a contribution travels. With ``topk`` the means of two partners differ where only one has sent."""
    topk: Annotated[int, msgspec.Meta(ge=1, le=128)] = 64
    """Of each 256 elements, how many the codec ``topk`` sends, in 4 + 2 topk bytes. 70 take what int4 takes and learn
    more; 32 take half of that and learn clearly less (BENCHMARKS.md)."""
    drift: Annotated[float, msgspec.Meta(ge=0, le=0.3)] = 0.0
    """Strength of the drift correction: replicas learn from partners where their own text pulls too hard
    (`farandole.training.outer.drift`). 0: none. Costs no traffic, 8 bytes of memory for each parameter (12 with
    a GPU), and 4 in each checkpoint."""
    fragments: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Parts of the parameters, of which a round exchanges one (Streaming DiLoCo, arXiv 2501.18512)."""

    vectors: ClassVar[tuple[str, ...]] = ()
    """Names of the vectors that the rule keeps next to the slow weights: one fp32 number for each parameter, zero at
    first. They are part of every checkpoint, and a newcomer downloads them. A name that ends in ``square`` promises
    that no number is negative."""
    own_vectors: ClassVar[tuple[str, ...]] = ()
    """Names of further vectors of that kind, which no other replica needs: a newcomer begins with zeros."""
    sends_far_from_slow: ClassVar[bool] = False
    """What the codec ``topk`` sends: the elements that are furthest from the sender's slow weights, and receivers take
    their own slow weights for the rest. If false: those that moved furthest since they were last sent, which the codec
    remembers, and receivers take what they have sent themselves."""

    @property
    def remembers_sent(self) -> bool:
        """Whether the codec keeps a vector of what it has sent."""
        return self.codec == "topk" and not self.sends_far_from_slow

    @property
    def momentum_gain(self) -> float:
        """The number of rounds' movements that the vector ``momentum`` adds up to, if all have one direction."""
        return 1.0

    @property
    def kind(self) -> str:
        """The name of the rule and of its module in `farandole.training.outer`."""
        return str(self.__struct_config__.tag)

    @property
    def is_lossy(self) -> bool:
        """Whether receivers decode something else than what was encoded."""
        return self.codec != "fp32"

    @property
    def problems(self) -> list[str]:
        """Problems that the bounds of the fields cannot express. A rule adds its own to these."""
        return [
            f"outer.{name} is {value}: it must be a finite number"
            for name, value in msgspec.structs.asdict(self).items()
            if isinstance(value, float) and not math.isfinite(value)
        ]


class NoLoCoConfig(OuterConfig, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="noloco"):
    """The NoLoCo step: m <- alpha m + beta mean(theta - phi) + gamma (mean(phi) - phi_own); phi <- phi + m."""

    alpha: _UnitInterval = 0.5
    """Share of the momentum that an outer step keeps."""
    beta: _Positive = 0.7
    """Strength of the pair's mean movement."""
    gamma: _Positive = 0.7
    """Strength of the pull between the pair's slow weights."""
    momentum: Momentum = "heavy_ball"
    """``nesterov``: the step looks ahead by the momentum (no better with NoLoCo: docs/learning.md)."""

    vectors = ("momentum",)

    @property
    def momentum_gain(self) -> float:
        """See `OuterConfig.momentum_gain`. The distance between replicas, which gamma pulls at, is about a movement."""
        return (self.beta + self.gamma) / (1.0 - self.alpha)

    @property
    def problems(self) -> list[str]:
        """Problems of every rule, and a gamma at which pairs are unstable."""
        limit = gamma_limit(self.alpha, self.momentum)
        if 0.0 < self.gamma < limit:
            return super().problems
        return [
            *super().problems,
            f"outer.gamma is {self.gamma:g}, but with alpha = {self.alpha:g} and momentum = {self.momentum!r} pairs "
            f"are stable only for 0 < gamma < {_LIMITS[self.momentum]} = {limit:.4g}: beyond, the replicas drift apart",
        ]


class DiLoCoConfig(OuterConfig, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="diloco"):
    """DiLoCo's step (arXiv 2311.08105): SGD with momentum on the slow weights, by the mean outer gradient of *all*."""

    learning_rate: _Positive = 0.7
    alpha: _UnitInterval = 0.9
    """Share of the momentum that an outer step keeps."""
    momentum: Momentum = "nesterov"

    vectors = ("momentum",)

    @property
    def momentum_gain(self) -> float:
        """See `OuterConfig.momentum_gain`."""
        return 1.0 / (1.0 - self.alpha)

    @property
    def problems(self) -> list[str]:
        """Always a problem: no run can use this rule yet. `farandole testnet compare` plays it with a mean over all."""
        return [
            *super().problems,
            "outer.kind is 'diloco': its replicas must share their slow weights, by a mean over all of them, and "
            "exchanges in pairs let these drift apart; take 'noloco'",
        ]


class PlainConfig(OuterConfig, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="plain"):
    """The mean of the fast weights, with no state besides the slow weights."""


class GASLoCConfig(OuterConfig, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="gasloc"):
    """GASLoC's step (arXiv 2606.11081): gossip, with momentum on the weights after the local update."""

    learning_rate: _Positive = 0.7
    """Share of a round's progress that counts: the local update is y = phi + learning_rate (theta - phi)."""
    pull: _Positive = 1.0
    """Strength of the gossip: the way from a replica's y to the mean. 1: the mean itself."""
    gamma: _UnitInterval = 0.5
    """Share of the last movement of y that is added again."""

    vectors = ("momentum",)

    @property
    def momentum_gain(self) -> float:
        """See `OuterConfig.momentum_gain`. ``pull`` acts on the distance between replicas, about a movement."""
        return (self.gamma * self.learning_rate + self.pull) / (1.0 - self.gamma)

    @property
    def problems(self) -> list[str]:
        """Problems of every rule, and a pull at which pairs are unstable: without progress, this is heavy ball."""
        return super().problems + _pull_problems("pull", self.pull, "gamma", self.gamma)


class SparseLoCoConfig(
    OuterConfig, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="sparseloco"
):
    """SparseLoCo's step (arXiv 2508.15706): few elements of the outer gradient, and memory of the rest."""

    codec: Codec = "topk"
    topk: Annotated[int, msgspec.Meta(ge=1, le=128)] = 8
    """Of each 256 elements, how many are sent. 8 are 3 %, the paper sends 1 to 3 %."""
    learning_rate: Annotated[float, msgspec.Meta(gt=0, lt=2)] = 1.0
    beta: _UnitInterval = 0.95
    """Share of what was not sent that a round keeps."""

    own_vectors = ("residual",)
    sends_far_from_slow = True


class CO2Config(OuterConfig, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="co2"):
    """CO2's step (arXiv 2401.16265): momentum, with a penalty on what arrives late."""

    learning_rate: _Positive = 0.7
    alpha: _UnitInterval = 0.5
    """Share of the momentum that an outer step keeps."""
    gap_penalty: Annotated[float, msgspec.Meta(ge=1, le=100)] = 2.0
    """The movement of a late outer step is divided by this before it enters the momentum. 1: no penalty."""

    vectors = ("momentum",)

    @property
    def momentum_gain(self) -> float:
        """See `OuterConfig.momentum_gain`. The distance to the mean has the distance between replicas in it."""
        return 2.0 / (1.0 - self.alpha)

    @property
    def problems(self) -> list[str]:
        """Problems of every rule, and a learning rate at which pairs are unstable: without progress, it is a pull."""
        return super().problems + _pull_problems("learning_rate", self.learning_rate, "alpha", self.alpha)


OuterRules = NoLoCoConfig | DiLoCoConfig | PlainConfig | GASLoCConfig | SparseLoCoConfig | CO2Config
"""The rules that a manifest may name, by ``kind``."""

# Older manifests name no kind, because there was no choice of rules, and say whether codec errors are fed back, which
# replicas that keep their own contribution exact do not need.
DEFAULT_KIND = "noloco"
_DROPPED = "error_feedback"


def with_kind(section: object) -> object:
    """Return a parsed section ``[outer]``, with the default kind if it names none, and without dropped settings."""
    if not isinstance(section, Mapping):
        return section
    settings: dict[Any, Any] = {"kind": DEFAULT_KIND, **section}
    settings.pop(_DROPPED, None)
    return settings


def _pull_problems(name: str, pull: float, momentum_name: str, alpha: float) -> list[str]:
    """Return the problem of a strength at which heavy ball pulls the replicas of pairs apart, if it is one."""
    limit = gamma_limit(alpha)
    if 0.0 < pull < limit:
        return []
    return [
        f"outer.{name} is {pull:g}, but with {momentum_name} = {alpha:g} pairs are stable only for 0 < {name} < "
        f"2 (1 - {momentum_name}^2) = {limit:.4g}: beyond, the replicas drift apart"
    ]


_LIMITS: dict[Momentum, str] = {"heavy_ball": "2 (1 - alpha^2)", "nesterov": "its limit"}


def gamma_limit(alpha: float, momentum: Momentum = "heavy_ball") -> float:
    """Return the least gamma at which replicas drift apart: where second moments of random pairs stop contracting.

    Heavy ball: 2 (1 - alpha^2); the paper's own window (its equation 74) is wrong away from alpha = 0.5 (alpha 0.9,
    gamma 1.2 lies inside it and diverges). Nesterov: (2 a^2 - 1 + sqrt(1 + 4 a + 4 a^2 - 4 a^3 - 4 a^4)) /
    (a (2 a + 1)), 2 at a = 0. Both are derived for groups of two, and confirmed by simulation (`test_noloco.py`).
    """
    if momentum == "heavy_ball":
        return 2.0 * (1.0 - alpha * alpha)
    if alpha == 0.0:
        return 2.0
    root = math.sqrt(1 + 4 * alpha + 4 * alpha**2 - 4 * alpha**3 - 4 * alpha**4)
    return (2 * alpha**2 - 1 + root) / (alpha * (2 * alpha + 1))
