"""Settings of the outer rules: what the section ``[outer]`` of a run file may say.

An outer rule decides what replicas send to each other and how their slow weights move by what they receive. Its
settings are a struct here, which the manifest holds, and its mathematics is the file of the same name in
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
    """What every outer rule has: how contributions travel. The base of the rules' own settings."""

    codec: Codec = "fp32"
    """How a contribution travels. With ``topk`` the means of two partners differ where only one has sent."""
    topk: Annotated[int, msgspec.Meta(ge=1, le=128)] = 64
    """Of each 256 elements, how many the codec ``topk`` sends, in 4 + 2 topk bytes. 70 take what int4 takes and learn
    more; 32 take half of that and learn clearly less (BENCHMARKS.md)."""
    error_feedback: bool | None = None
    """Whether what the codec rounds away is added to the next contribution; null: where it helps, with int4."""
    fragments: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Parts of the parameters, of which a round exchanges one (Streaming DiLoCo, arXiv 2501.18512)."""

    vectors: ClassVar[tuple[str, ...]] = ()
    """Names of the vectors that the rule keeps beside the slow weights: one fp32 number for each parameter, zero at
    first. They are part of every checkpoint, and a newcomer downloads them. A name that ends in ``square`` promises
    that no number is negative."""

    @property
    def momentum_gain(self) -> float:
        """How many movements of a round the vector ``momentum`` adds up to, if all have one direction."""
        return 1.0

    @property
    def kind(self) -> str:
        """The rule's name, and that of its module in `farandole.training.outer`."""
        return str(self.__struct_config__.tag)

    @property
    def feeds_errors_back(self) -> bool:
        """``error_feedback``, decided."""
        return self.codec == "int4" if self.error_feedback is None else self.error_feedback

    @property
    def problems(self) -> list[str]:
        """What the bounds of the fields cannot express; a rule adds its own to these."""
        problems = [
            f"outer.{name} is {value}: it must be a finite number"
            for name, value in msgspec.structs.asdict(self).items()
            if isinstance(value, float) and not math.isfinite(value)
        ]
        if self.error_feedback and self.codec == "fp32":
            problems.append("outer.error_feedback is set, but the codec fp32 is exact: it makes no error to feed back")
        if self.error_feedback is not None and self.codec == "topk":
            problems.append("outer.error_feedback is set, but the codec topk feeds back in its own way, and always")
        return problems


class NoLoCoConfig(OuterConfig, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="noloco"):
    """The NoLoCo step: m <- alpha m + beta mean(theta - phi) + gamma (mean(phi) - phi_own); phi <- phi + m."""

    alpha: _UnitInterval = 0.5
    beta: _Positive = 0.7
    gamma: _Positive = 0.7
    momentum: Momentum = "heavy_ball"

    vectors = ("momentum",)

    @property
    def momentum_gain(self) -> float:
        """As `OuterConfig.momentum_gain`; the distance between replicas, which gamma pulls at, is about a movement."""
        return (self.beta + self.gamma) / (1.0 - self.alpha)

    @property
    def problems(self) -> list[str]:
        """Pairs must be stable, beside what every rule asks."""
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
        """As `OuterConfig.momentum_gain`."""
        return 1.0 / (1.0 - self.alpha)

    @property
    def problems(self) -> list[str]:
        """No run can have this rule yet: `farandole testnet compare` plays it with a mean over all replicas."""
        return [
            *super().problems,
            "outer.kind is 'diloco': its replicas must share their slow weights, by a mean over all of them, and "
            "exchanges in pairs let these drift apart; take 'noloco'",
        ]


OuterRules = NoLoCoConfig | DiLoCoConfig
"""The rules that a manifest may name, by ``kind``."""

# Manifests from before there was a choice name no kind.
DEFAULT_KIND = "noloco"


def with_kind(section: object) -> object:
    """A section ``[outer]`` as it was parsed, with the default kind if it names none."""
    if isinstance(section, Mapping) and "kind" not in section:
        settings: dict[Any, Any] = {"kind": DEFAULT_KIND, **section}
        return settings
    return section


_LIMITS: dict[Momentum, str] = {"heavy_ball": "2 (1 - alpha^2)", "nesterov": "its limit"}


def gamma_limit(alpha: float, momentum: Momentum = "heavy_ball") -> float:
    """The least gamma at which the replicas drift apart: where second moments of random pairs stop contracting.

    Heavy ball: 2 (1 - alpha^2); the paper's own window (its equation 74) is wrong away from alpha = 0.5 (alpha 0.9,
    gamma 1.2 lies inside it and diverges). Nesterov: (2 a^2 - 1 + sqrt(1 + 4 a + 4 a^2 - 4 a^3 - 4 a^4)) /
    (a (2 a + 1)), 2 at a = 0. Both derived for groups of two, and borne out by simulation (`test_noloco.py`).
    """
    if momentum == "heavy_ball":
        return 2.0 * (1.0 - alpha * alpha)
    if alpha == 0.0:
        return 2.0
    root = math.sqrt(1 + 4 * alpha + 4 * alpha**2 - 4 * alpha**3 - 4 * alpha**4)
    return (2 * alpha**2 - 1 + root) / (alpha * (2 * alpha + 1))
