"""Settings of the ends of rounds: the sections ``[rounds]``, ``[outer]`` and ``[screening]`` of a run file.

`RoundConfig` says when a round ends. An outer rule decides what replicas send to each other and how their slow weights
move by what they receive. A screening rule decides whether a partner's contribution is averaged, and how far. A rule's
settings are a struct here, which the manifest holds. An outer rule's code is in ``training/outer/rule.py``, that of a
screening rule of kind ``guard`` in ``training/screening/guard.py``. To add one, write both, and name the struct in
`OuterRules` or `ScreeningRules`.

The sizes of codecs and of a replica's vectors follow from these settings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec

from ..wire.safetensors import FP32_BYTES, MAX_HEADER_BYTES

Codec = Literal["fp32", "bf16", "fp16", "int8", "int4"]
MomentumCodec = Literal["none", "int8", "int4"]
Momentum = Literal["heavy_ball", "nesterov"]

# Each partner halves the variance between members: after eight it is a 256th, and inner steps wait for each exchange.
MAX_PARTNERS = 8

_Positive = Annotated[float, msgspec.Meta(gt=0)]
_UnitInterval = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class RoundConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Length of a round: a time box, a number of inner steps, or whichever ends first.

    Boxes are the default, because nodes with boxes fall into step and take part at any speed. Without them, nodes whose
    rounds end further apart than half of ``exchange_seconds`` do not meet, so this suits equal machines started
    together.
    """

    inner_steps: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    """Most inner steps a round; 0: as many as fit into the box."""
    round_seconds: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 60.0
    """Length of a round's box; 0: no box, a round ends by its inner steps alone."""
    exchange_seconds: Annotated[float, msgspec.Meta(ge=0.1, le=3_600)] = 30.0
    """From the end of the inner steps, the longest that a node waits for a partner and its contribution."""
    overlap: bool = False
    """Whether the next round's inner steps go on during the exchange; the outer step then comes that much later."""
    partners: Annotated[int, msgspec.Meta(ge=1, le=MAX_PARTNERS)] = 1
    """Partners that a node meets one after another once its inner steps end. Each meeting counts as a round."""

    def takes_steps(self, round_index: int) -> bool:
        """Return whether a round has inner steps; otherwise it is another meeting right after the round before."""
        return round_index % self.partners == 0


class OuterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings that every outer rule has: how contributions travel. Base class of the rules' settings."""

    codec: Codec = "fp32"
    """How a contribution travels."""
    momentum_codec: MomentumCodec = "none"
    """How Muon's momentum travels with a contribution, to be averaged like the weights; ``none``: it stays at home."""
    fragments: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Parts of the parameters, of which a round exchanges one (Streaming DiLoCo, arXiv 2501.18512)."""

    vectors: ClassVar[tuple[str, ...]] = ()
    """Names of the vectors that the rule keeps next to the slow weights: one fp32 number for each parameter, zero at
    first. They are part of every checkpoint, and a newcomer downloads them. A name that ends in ``square`` promises
    that no number is negative."""

    @property
    def momentum_gain(self) -> float:
        """The number of rounds' movements that the vector ``momentum`` adds up to, if all have one direction."""
        return 1.0

    @property
    def kind(self) -> str:
        """The name of the rule in run files."""
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


class PlainConfig(OuterConfig, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="plain"):
    """The mean of the fast weights, with no state besides the slow weights."""


class AdaptersConfig(
    OuterConfig, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="adapters"
):
    """``plain``, but adapters' products B A are averaged, and split again."""


OuterRules = NoLoCoConfig | PlainConfig | AdaptersConfig
"""The rules that a manifest may name, by ``kind``."""

# Older manifests name no kind, because there was no choice of rules, and have settings that went since, which make no
# difference: whatever they are (None), or with these values.
DEFAULT_KIND = "noloco"
_DROPPED: Mapping[str, Mapping[str, float | None]] = {
    "inner": {"ends_rate": 1.0, "z_loss": 0.0},
    "outer": {"drift": 0.0, "error_feedback": None, "topk": None},
    "screening": {"checked_share": None, "first_checks": None},
}


def with_known(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest's parsed settings, with the default kinds of rules, and without dropped settings."""
    known, kinds = dict(settings), {"outer": DEFAULT_KIND, "screening": "guard"}
    for section, dropped in _DROPPED.items():
        if isinstance(given := known.get(section), Mapping):
            kept = {
                name: value
                for name, value in given.items()
                if name not in dropped or dropped[name] not in (value, None)
            }
            known[section] = ({"kind": kinds[section]} if section in kinds else {}) | kept
    return known


_LIMITS: dict[Momentum, str] = {"heavy_ball": "2 (1 - alpha^2)", "nesterov": "its limit"}


def gamma_limit(alpha: float, momentum: Momentum = "heavy_ball") -> float:
    """Return the least gamma at which replicas drift apart: where second moments of random pairs stop contracting.

    Heavy ball: 2 (1 - alpha^2); the paper's own window (its equation 74) is wrong away from alpha = 0.5 (alpha 0.9,
    gamma 1.2 lies inside it and diverges). Nesterov: (2 a^2 - 1 + sqrt(1 + 4 a + 4 a^2 - 4 a^3 - 4 a^4)) /
    (a (2 a + 1)), 2 at a = 0. Both are derived for groups of two, and confirmed by simulation (`test_rules.py`).
    """
    if momentum == "heavy_ball":
        return 2.0 * (1.0 - alpha * alpha)
    if alpha == 0.0:
        return 2.0
    root = math.sqrt(1 + 4 * alpha + 4 * alpha**2 - 4 * alpha**3 - 4 * alpha**4)
    return (2 * alpha**2 - 1 + root) / (alpha * (2 * alpha + 1))


# Encoded sizes of the codecs. Imports no torch: plans and the doctor use this.
#
# The codecs in `farandole.training.outer.codec` take their sizes from here, and describe the layouts.

SCALE_BYTES: Final = 4  # fp32


@dataclass(frozen=True, slots=True)
class CodecSize:
    """The size of a codec."""

    bits: int
    """Bits of each element."""
    block: int = 0
    """Elements that share a scale; 0: no scales."""

    def of(self, num_elements: int) -> int:
        """Return the bytes that ``num_elements`` elements take."""
        scales = SCALE_BYTES * -(-num_elements // self.block) if self.block else 0
        return scales + -(-num_elements * self.bits // 8)


SIZES: Final[Mapping[str, CodecSize]] = MappingProxyType(
    {
        "fp32": CodecSize(32),
        "bf16": CodecSize(16),
        "fp16": CodecSize(16),
        "int8": CodecSize(8, 256),
        "int4": CodecSize(4, 64),
    }
)


def encoded_bytes(codec: str, num_elements: int) -> int:
    """Return the bytes that ``num_elements`` fp32 numbers take in a codec of a manifest."""
    return SIZES[codec].of(num_elements)


# The vectors of a replica's state: their names, and how many bytes they take in a checkpoint.
#
# Each vector has one fp32 number for each parameter of the replica; ``square``, for each that AdamW steps. A
# checkpoint's tensors are called VECTOR/PARAMETER, for example ``slow/layers.0.norm.weight``.

SLOW: Final = "slow"
"""The weights after the last outer step."""
FAST: Final = "fast"
"""The weights now. Stored only with fragments: without fragments a checkpoint is written after an outer step, when they
are the slow weights."""
OPTIMIZER_VECTORS: Final = ("mean", "square")
"""AdamW's running means of the gradient and of its square. They would double a newcomer's download and are worth a few
dozen steps, which a replica without them takes slowly (`farandole.training.inner.optimizer.ramp`)."""
DROPPED: Final = ("error", "drift")
"""Vectors that older checkpoints may have, and nothing reads: what a codec had rounded away, and a correction."""
# Vectors of a checkpoint in addition to the required ones: the optimizer's two, the fast weights, and the dropped ones.
_NUM_OPTIONAL: Final = 5


def required_vectors(outer: OuterConfig) -> tuple[str, ...]:
    """Return the vectors that a newcomer to a run downloads: the slow weights, and the outer rule's shared state."""
    return (SLOW, *outer.vectors)


def is_required(outer: OuterConfig, tensor: str) -> bool:
    """Return whether a newcomer needs this tensor."""
    return tensor.partition("/")[0] in required_vectors(outer)


def is_square(tensor: str) -> bool:
    """Return whether this tensor must not have negative numbers."""
    return tensor.partition("/")[0].endswith("square")


def required_bytes(outer: OuterConfig, num_parameters: int) -> int:
    """Return the bytes that a newcomer downloads of a model of this size, without the header."""
    return num_parameters * len(required_vectors(outer)) * FP32_BYTES


def max_checkpoint_bytes(outer: OuterConfig, num_parameters: int) -> int:
    """Return the most bytes that an honest checkpoint of a model of this size takes."""
    num_vectors = len(required_vectors(outer)) + _NUM_OPTIONAL
    return num_parameters * num_vectors * FP32_BYTES + MAX_HEADER_BYTES


# Screening rules


class ScreeningConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The base of the rules' own settings. Bound each float at both ends: only then msgspec refuses NaN."""

    @property
    def kind(self) -> str:
        """Return the rule's name, which is also the name of its module in `farandole.training.screening`."""
        return str(self.__struct_config__.tag)


class GuardConfig(
    ScreeningConfig, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="guard"
):
    """Clips a contribution that is further away than usual, and averages no more of it than the loss allows."""

    radius: Annotated[float, msgspec.Meta(ge=1, le=100)] = 4.0
    """Distances up to this many medians of the accepted ones are not clipped."""
    first_radius: Annotated[float, msgspec.Meta(ge=0, le=100)] = 2.0
    """Nor are those up to this many times the node's own movement in the round: all there is at first."""
    max_radius: Annotated[float, msgspec.Meta(ge=1, le=1_000)] = 20.0
    """Distances above this many times the median of the node's own movements are clipped, whatever was accepted."""
    min_clip: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.02
    """What would be clipped to less than this share of its distance is refused, except in first meetings."""
    min_share: Annotated[float, msgspec.Meta(ge=0, le=0.5)] = 1 / 3
    """The least share of the mean that the tokens behind a contribution may leave to either partner."""
    least_loss_increase: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1
    """As a share of the loss on the text that a rule judges by: a mean may be worse by this, which is noise. More than
    0.003 counts as 0.003; older releases allow all of it."""
    max_loss_increase: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1
    """A mean that is worse by more counts for nothing, whatever inner steps gain and earlier means have cost. A tenth
    lets honest members pass in the first rounds, and at large learning rates; 0.01, with 0.001 as the least, is for
    runs whose members are there all the time.
    """


ScreeningRules = GuardConfig
"""The rules that a manifest may name, by ``kind``: a union of the structs above, of one today."""

DEFAULT_SCREENING = GuardConfig()
"""The rule of a manifest that names none."""
