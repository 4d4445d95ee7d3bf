"""Choose settings of a run that fit the machines and lines of its members: `farandole run plan` and `run create`.

A plan changes six settings: ``codec`` and ``fragments``, ``exchange_seconds``, ``round_seconds`` and ``overlap``, and
``num_stages`` where a member's memory does not hold the model. It prefers, in this order: the codec that loses nothing
(int8), exchanges that are short (`GOOD_EXCHANGE`), and few fragments, so that a parameter is averaged often. Rounds are
as short as they can be without trainers that wait: as long as an exchange may take where rounds overlap, else nine
times as long as one takes.

What else a run file leaves open gets first the settings that learned most in our comparisons (`best_known`), each with
its reason. The measurements are in docs/learning.md and BENCHMARKS.md: models of 0.5 and 2.9 million parameters,
trained from the start on text of one kind. The defaults of the manifest's own fields are NoLoCo's published ones, and
stay so: manifests that leave them out are signed and kept.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import msgspec

from ..run.manifest import Manifest
from ..run.models import num_parameters
from ..run.rules import AdaptersConfig, OuterConfig, PlainConfig
from ..wire.errors import ManifestError
from .needs import TRANSFER_SHARE, USUAL_RATE, Memory, Needs, needs_of

# Parameters, and AdamW's learning rate with the plain mean: of the rates tried, factors of 2 apart, the lowest with a
# loss within 0.3 % of the best. (The last is the higher of two, in 400 inner steps with one seed.)
RATES: Final = ((504_672, 6e-3), (2_927_040, 3e-3), (124_972_800, 3.75e-4))
# Muon's steps have the size of AdamW's. With the first two models its best rate was twice as high; with the third this
# is the only one tried.
MUON_FACTOR: Final = 2.0
# Of the inner steps, in the comparisons.
WARMUP_SHARE: Final = 0.05

_REASONS: Final[Mapping[str, str]] = {
    "inner.learning_rate": "tuned with 0.5, 2.9 and 125 M parameters",
    "inner.warmup_steps": "a twentieth of total_steps, as measured",
    "outer.kind": "as good as rules with an outer momentum, and no vector of it to keep",
    "outer.fragments": "all at once would take too long on this line",
    "rounds.overlap": "training goes on during exchanges",
    "rounds.exchange_seconds": "about three times as long as an exchange, or more",
    "rounds.round_seconds": "as short as the line, or audits, allow: short rounds learn more",
    "model.num_stages": "the whole model is too large for a member's memory",
    "pipeline.recompute": "takes less memory for a stage's activations",
    "pipeline.codec": "half of bf16's traffic between stages, without a measured loss",
    "pipeline.in_flight": "takes less memory for a stage's activations",
}
# Settings of an outer rule that any rule has: they say nothing of which rule a run file means.
_COMMON_OUTER: Final = frozenset(OuterConfig.__struct_fields__)


# Share of a line that contributions are planned to have. In namespaces with 20 Mbit/s they got 0.7 to 0.85 of it
# (BENCHMARKS.md, A slow link); copies of checkpoints take up to a tenth of a member's time.
LINE_SHARE: Final = 0.8
# An exchange is planned to end within this many seconds where possible: a line that changes or a partner that leaves
# costs all of an exchange.
GOOD_EXCHANGE: Final = 180.0
# Round values for times, in seconds: from the shortest rounds that were played between homes (BENCHMARKS.md, A slow
# link) to the longest that a manifest accepts.
STEPS: Final = tuple(map(float, (10, 15, 20, 30, 45, 60, 90, 120, 180, 240, 300, 450, 600, 900, 1_200, 1_800, 3_600)))
FRAGMENTS: Final = (1, 2, 4, 8, 16, 32, 64)
# int8 lost nothing against fp32 in measurements, int4 did (BENCHMARKS.md, Codecs and late outer steps).
CODECS: Final = ("int8", "int4")
# Without overlap a trainer is busy for at least this share of its time.
GOOD_BUSY_SHARE: Final = 0.9
# Where the model is cut, an exchange that takes more seconds than this is worth the memory for two rounds at once.
OVERLAP_FROM: Final = 3.0
# An exchange takes at least this many seconds, however little is sent: of a quarter of int8 (0.3 s on that line) it
# took 0.9 to 1.1 s between homes 50 ms apart (BENCHMARKS.md, A slow link).
LEAST_EXCHANGE: Final = 1.0
# Seconds for an exchange where members' rounds may end far apart; half of them may pass until a partner is ready.
LEAST_UNBOXED: Final = 30.0
# The least that a manifest accepts.
MIN_EXCHANGE: Final = 0.1
# In shorter rounds than 40 s it goes unnoticed that a member commits to none (docs/threat-model.md).
LEAST_AUDITED: Final = 45.0
# Microbatches at a node at once, of a model that is cut. Each keeps only its input (`recompute`).
IN_FLIGHT: Final = {"pipeline.in_flight": 4, "pipeline.recompute": True}
# Members of each stage at least, so that one may leave.
MIN_HOLDERS: Final = 2
# More stages than this do not pay: each adds a hop to every token's route.
MAX_PLANNED_STAGES: Final = 32

BY_TOKENS: Final = {"inner.warmup_tokens": "inner.warmup_steps", "inner.total_tokens": "inner.total_steps"}
"""Settings of a run file in tokens of one member, and those of the manifest that they become."""
NUM_STAGES: Final = "model.num_stages"
STAGES: Final = frozenset({NUM_STAGES, *IN_FLIGHT})
"""Settings by which a model is cut."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A member's machine: bytes a second of its line, and bytes of memory (None: not checked)."""

    upload: float
    download: float
    memory: int | None = None
    gpu: int | None = None
    """Bytes of the GPU's memory; None: it trains on the CPU."""
    is_lean: bool = False
    """Whether it trains with `--lean`; not where the model is cut."""

    @property
    def rate(self) -> float:
        """Return the bytes a second of an exchange, which goes both ways at once."""
        return min(self.upload, self.download)

    def without(self, taken: int) -> Machine:
        """Return the machine with ``taken`` bytes less of the memory in which it trains."""
        if self.gpu is not None:
            return replace(self, gpu=self.gpu - taken)
        return self if self.memory is None else replace(self, memory=self.memory - taken)

    def memory_of(self, needs: Needs) -> Memory:
        """Return the memory that a run with these needs takes of this machine."""
        return needs.memory(has_gpu=self.gpu is not None, is_lean=self.is_lean)


@dataclass(frozen=True, slots=True)
class Plan:
    """A manifest, and what it needs of a machine."""

    manifest: Manifest
    needs: Needs
    seconds: float
    """The expected duration of an exchange."""
    lacks_line: bool
    lacks_memory: bool

    @property
    def fits(self) -> bool:
        """Return whether a member with this machine can take part in every round."""
        return not (self.lacks_line or self.lacks_memory)

    @property
    def period(self) -> float:
        """Return the seconds in which every parameter is averaged with each partner of a round once.

        Infinity if rounds have no length.
        """
        rounds = self.manifest.rounds
        wait = 0.0 if rounds.overlap else rounds.partners * self.seconds
        length = rounds.round_seconds + wait if rounds.round_seconds else math.inf
        return self.manifest.outer.fragments * length


def judge(manifest: Manifest, machine: Machine) -> Plan:
    """Judge how a manifest, unchanged, suits a machine."""
    needs = needs_of(manifest)
    memory = machine.memory_of(needs)
    lacks_device = machine.gpu is not None and memory.device > machine.gpu
    lacks_host = machine.memory is not None and memory.host > machine.memory
    return Plan(
        manifest=manifest,
        needs=needs,
        seconds=needs.seconds(LINE_SHARE * machine.rate),
        lacks_line=needs.rate > machine.rate,
        lacks_memory=lacks_device or lacks_host,
    )


def plan(manifest: Manifest, machine: Machine, given: Collection[str] = (), num_members: int | None = None) -> Plan:
    """Choose the settings that suit the machine best; if none do, the plan says what is lacking.

    ``given``: settings that stay as they are, such as ``outer.codec``. ``num_members``: of the run; there are at least
    `MIN_HOLDERS` to a stage. A model is cut for memory alone: its activations need many times the bandwidth that the
    cut saves.
    """
    planned = [_plan_line(manifest, machine, given)]
    for cut in _cuts(manifest, given, num_members):
        if not planned[-1].lacks_memory:
            break
        planned.append(_plan_line(cut, machine, given))
    return planned[0] if planned[-1].lacks_memory else planned[-1]


def complete(manifest: Manifest, given: Collection[str]) -> Manifest:
    """Choose what the run file leaves open: the best known settings, for home lines. The whole model stays whole.

    ``given``: the settings in the run file.
    """
    return _plan_line(best_known(manifest, given), Machine(USUAL_RATE, USUAL_RATE), given).manifest


def remedy(manifest: Manifest) -> Manifest:
    """Return the same run with settings for which a line of `USUAL_RATE` is enough, or comes nearest."""
    return _plan_line(manifest, Machine(USUAL_RATE, USUAL_RATE)).manifest


def changes(before: Manifest, after: Manifest) -> dict[str, Any]:
    """Return the values that differ in ``after``, by their names in a run file, such as ``outer.codec``."""
    found = {}
    for section in ("model", "inner", "outer", "rounds", "pipeline"):
        old, new = (getattr(each, section) for each in (before, after))
        if section == "outer" and new.kind != old.kind:
            found["outer.kind"] = new.kind
        for field in new.__struct_fields__:
            if getattr(new, field) != getattr(old, field, None):
                found[f"{section}.{field}"] = getattr(new, field)
    return found


def choices(before: Manifest, after: Manifest, given: Collection[str]) -> dict[str, Any]:
    """Return `changes`, and the times that were chosen although they are the defaults; ``given``: as for `complete`."""
    found, rounds = changes(before, after), after.rounds
    times = {f"rounds.{name}": getattr(rounds, name) for name in ("round_seconds", "exchange_seconds", "overlap")}
    if rounds.inner_steps:
        del times["rounds.round_seconds"]
    return found | {name: value for name, value in times.items() if name not in given}


def given_by(settings: object) -> frozenset[str]:
    """Return the settings in a parsed run file, as ``section.field``."""
    if not isinstance(settings, dict):
        return frozenset()
    sections = ((name, value) for name, value in settings.items() if isinstance(value, dict))
    names = (f"{name}.{field}" for name, value in sections for field in value)
    return frozenset(BY_TOKENS.get(name, name) for name in names)


def _cuts(manifest: Manifest, given: Collection[str], num_members: int | None) -> Iterator[Manifest]:
    """Yield the model in two stages, then in more; where the run file sets their number, only with less in flight."""
    if NUM_STAGES in given or manifest.model.num_stages > 1:
        if manifest.model.num_stages > 1 and not IN_FLIGHT.keys() & set(given):
            yield _in_little_memory(manifest)
        return
    most = MAX_PLANNED_STAGES if num_members is None else num_members // MIN_HOLDERS
    for num_stages in range(2, min(most, MAX_PLANNED_STAGES) + 1):
        model = msgspec.structs.replace(manifest.model, num_stages=num_stages, stage_layers=())
        try:
            cut = _in_little_memory(_with_small_links(msgspec.structs.replace(manifest, model=model), given))
            needs_of(cut)
        except ManifestError:  # it cannot be cut so
            continue
        yield cut


def _with_small_links(manifest: Manifest, given: Collection[str]) -> Manifest:
    """Return a run in stages whose activations travel in int8, which lost nothing (docs/decisions.md)."""
    if "pipeline.codec" in given:
        return manifest
    return msgspec.structs.replace(manifest, pipeline=msgspec.structs.replace(manifest.pipeline, codec="int8"))


def _in_little_memory(manifest: Manifest) -> Manifest:
    """Return a run in stages whose nodes keep few activations."""
    settings = {name.removeprefix("pipeline."): value for name, value in IN_FLIGHT.items()}
    return msgspec.structs.replace(manifest, pipeline=msgspec.structs.replace(manifest.pipeline, **settings))


def _plan_line(manifest: Manifest, machine: Machine, given: Collection[str] = ()) -> Plan:
    """Choose codec and fragments: the first pair with short exchanges, else the first that fits, else the smallest."""
    outer, found = manifest.outer, list[Plan]()
    for codec in [outer.codec] if "outer.codec" in given else CODECS:
        for fragments in [outer.fragments] if "outer.fragments" in given else FRAGMENTS:
            travels = msgspec.structs.replace(outer, codec=codec, fragments=fragments)
            with suppress(ManifestError):  # the run excludes that
                found.append(_timed(msgspec.structs.replace(manifest, outer=travels), machine, given))
    fitting = [plan for plan in found if not plan.lacks_line]
    short = [plan for plan in fitting if plan.manifest.rounds.exchange_seconds <= GOOD_EXCHANGE]
    choice = next(iter(short or fitting), None)
    return choice or min(found, key=lambda plan: plan.needs.rate, default=judge(manifest, machine))


def _timed(manifest: Manifest, machine: Machine, given: Collection[str]) -> Plan:
    """Plan the same run with times that suit the line."""
    seconds = needs_of(manifest).seconds(LINE_SHARE * machine.rate)
    rounds = manifest.rounds
    if "rounds.exchange_seconds" not in given:
        needed = math.ceil(seconds / TRANSFER_SHARE)
        exchange = _step(max(needed, LEAST_UNBOXED if _may_be_apart(manifest) else 0.0))
        if "rounds.round_seconds" in given and not _may_be_apart(manifest):
            exchange = min(exchange, max(needed, rounds.round_seconds, MIN_EXCHANGE))
        rounds = msgspec.structs.replace(rounds, exchange_seconds=exchange)
    if "rounds.overlap" not in given:
        may_be_late = not manifest.audits and rounds.partners == 1
        is_worth_it = manifest.model.num_stages == 1 or seconds > OVERLAP_FROM
        rounds = msgspec.structs.replace(rounds, overlap=may_be_late and is_worth_it)
    if "rounds.round_seconds" not in given and not rounds.inner_steps:
        wait = rounds.partners * max(seconds, LEAST_EXCHANGE) * GOOD_BUSY_SHARE / (1 - GOOD_BUSY_SHARE)
        least = max(rounds.exchange_seconds, 0.0 if rounds.overlap else wait, LEAST_AUDITED if manifest.audits else 0.0)
        rounds = msgspec.structs.replace(rounds, round_seconds=_step(least))
    return judge(msgspec.structs.replace(manifest, rounds=rounds), machine)


def _may_be_apart(manifest: Manifest) -> bool:
    """Return whether members' rounds may end far apart: without boxes, or where members' own loops take the steps."""
    return not manifest.rounds.round_seconds or manifest.model.external is not None


def _step(seconds: float) -> float:
    """Return the least of `STEPS` that is at least ``seconds``; the last one if there is none."""
    return next((step for step in STEPS if step >= seconds), STEPS[-1])


def best_known(manifest: Manifest, given: Collection[str]) -> Manifest:
    """Return a manifest with the best known outer rule, inner optimizer, learning rate and codec of activations.

    ``given``: the settings in the run file, such as ``outer.alpha``; they stay, and so does what they are for: a run
    file with a momentum keeps the rule that has one, and one with a learning rate its optimizer. Runs that start from a
    checkpoint, Hugging Face models, and members' own modules and loops keep their inner settings: nothing of the kind
    was measured.
    """
    model, outer, inner = manifest.model, manifest.outer, manifest.inner
    if not any(name.startswith("outer.") and name.removeprefix("outer.") not in _COMMON_OUTER for name in given):
        shapes = model.own.ends if model.own else model.external.parameters if model.external else {}
        rule = AdaptersConfig if any(".lora_" in name for name in shapes) else PlainConfig  # by peft's names
        outer = rule(**{name: getattr(outer, name) for name in _COMMON_OUTER})
    if manifest.start is None and model.hf is None and model.own is None and model.external is None:
        chosen: dict[str, Any] = {}
        if "inner.learning_rate" not in given:
            if not {"inner.optimizer", "inner.beta1", "inner.beta2"} & set(given):
                chosen["optimizer"] = "muon"
            is_muon = chosen.get("optimizer", inner.optimizer) == "muon"
            chosen["learning_rate"] = learning_rate_for(num_parameters(model), is_muon=is_muon)
        if "inner.warmup_steps" not in given:
            chosen["warmup_steps"] = round(WARMUP_SHARE * inner.total_steps)
        inner = msgspec.structs.replace(inner, **chosen)
    known = msgspec.structs.replace(manifest, outer=outer, inner=inner)
    return known if model.num_stages == 1 else _with_small_links(known, given)


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
        case "outer.codec", _:
            return "int8 is too much for this line, though it learns more"
        case "inner.optimizer", "muon":
            return "learned more than AdamW in every comparison"
    return _REASONS.get(setting, "")
