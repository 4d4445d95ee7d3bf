"""Settings for what a run file leaves open: those that learned most in our comparisons, each with its reason.

``run create`` and ``run plan`` choose them before they adapt a run to its members' lines and memory
(`farandole.protocol.planning.planning`). The measurements are in docs/learning.md and BENCHMARKS.md: models of 0.5, 2.9
and 125 million parameters, trained from the start on one kind of text. The defaults of the manifest's own fields are
NoLoCo's published ones, and stay so: manifests that leave them out are signed and kept.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any, Final

import msgspec

from ..run.manifest import InnerConfig, Manifest
from ..run.models import num_parameters
from ..run.outer_rules import OuterConfig, PlainConfig

# Parameters, and AdamW's learning rate with the plain mean: of the rates tried, factors of 2 apart, the lowest with a
# loss within 0.3 % of the best. (The last is the higher of two.)
RATES: Final = ((504_672, 6e-3), (2_927_040, 3e-3), (124_972_800, 3.75e-4))
# Muon's steps have the size of AdamW's. With the first two models its best rate was twice as high; with the third this
# is the only one tried.
MUON_FACTOR: Final = 2.0
# Of the inner steps, in the comparisons.
WARMUP_SHARE: Final = 0.05

_REASONS: Final[Mapping[str, str]] = {
    "inner.learning_rate": "tuned with 0.5, 2.9 and 125 M parameters",
    "inner.warmup_steps": "a twentieth of total_steps, as measured",
    "outer.kind": "with AdamW better than DiLoCo, with Muon about level; no momentum vector",
    "outer.fragments": "all at once would take too long on this line",
    "rounds.overlap": "training goes on during exchanges",
    "rounds.exchange_seconds": "about three times as long as an exchange, or more",
    "rounds.round_seconds": "as short as the line, or audits, allow: short rounds learn more",
    "model.num_stages": "the whole model is too large for a member's memory",
    "pipeline.recompute": "takes less memory for a stage's activations",
    "pipeline.in_flight": "takes less memory for a stage's activations",
}
# Settings of an outer rule that any rule has: they say nothing of which rule a run file means.
_COMMON_OUTER: Final = frozenset(OuterConfig.__struct_fields__)


def best_known(manifest: Manifest, given: Collection[str]) -> Manifest:
    """Return a manifest with the best known outer rule, inner optimizer and learning rate.

    ``given``: the settings in the run file, such as ``outer.alpha``; they stay, and so does what they are for: a run
    file with a momentum keeps the rule that has one, and one with a learning rate its optimizer. Runs that start from a
    checkpoint, Hugging Face models, and members' own modules and loops keep their inner settings: nothing of the kind
    was measured.
    """
    outer, inner = manifest.outer, manifest.inner
    if not any(name.startswith("outer.") and name.removeprefix("outer.") not in _COMMON_OUTER for name in given):
        outer = PlainConfig(**{name: getattr(outer, name) for name in _COMMON_OUTER})
    model = manifest.model
    if manifest.start is None and model.hf is None and model.own is None and model.external is None:
        inner = _inner(inner, num_parameters(model), given)
    return msgspec.structs.replace(manifest, outer=outer, inner=inner)


def _inner(inner: InnerConfig, size: int, given: Collection[str]) -> InnerConfig:
    chosen: dict[str, Any] = {}
    if "inner.learning_rate" not in given:
        if not {"inner.optimizer", "inner.beta1", "inner.beta2"} & set(given):
            chosen["optimizer"] = "muon"
        is_muon = chosen.get("optimizer", inner.optimizer) == "muon"
        chosen["learning_rate"] = learning_rate_for(size, is_muon=is_muon)
    if "inner.warmup_steps" not in given:
        chosen["warmup_steps"] = round(WARMUP_SHARE * inner.total_steps)
    return msgspec.structs.replace(inner, **chosen)


def learning_rate_for(size: int, *, is_muon: bool) -> float:
    """Return a learning rate for a model with ``size`` parameters, to two digits.

    Between the sizes of `RATES` the logarithms are interpolated. For larger models the last slope goes on, and smaller
    ones have the first rate.
    """
    (smallest, rate), *_ = RATES
    if size > smallest:
        lines = list(pairwise(RATES))
        before, after = next((line for line in lines if size <= line[1][0]), lines[-1])
        slope = math.log(after[1] / before[1]) / math.log(after[0] / before[0])
        rate = before[1] * (size / before[0]) ** slope
    return float(f"{rate * (MUON_FACTOR if is_muon else 1.0):.2g}")


def reason_for(setting: str, value: object) -> str:
    """Return why a setting that the run file leaves open was given this value; empty if there is nothing to say."""
    match setting, value:
        case "outer.fragments", 1:
            return ""
        case "rounds.overlap", False:
            return "audits or several partners need it, or exchanges are short"
        case "outer.codec", "int8":
            return "a quarter of fp32's traffic, without a measured loss"
        case "outer.codec" | "outer.topk", _:
            return "int8 is too much for this line, though it learns more"
        case "inner.optimizer", "muon":
            return "learned more than AdamW in every comparison"
    return _REASONS.get(setting, "")
