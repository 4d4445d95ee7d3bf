"""Comparison of a run's requirements with a machine and its line, in sentences for people.

`farandole run create` compares with usual homes, `farandole join` and `farandole doctor` with this one. Memory is
compared before torch is loaded and, where the run is known, before any peer is dialled: a trainer with too little is
killed by the kernel again and again without a message.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from farandole.protocol.planning.needs import USUAL_MEMORY, USUAL_RATE, Memory, Needs, needs_of, needs_of_stage
from farandole.protocol.planning.planning import STAGES, Machine, changes, plan, reason_for, remedy
from farandole.protocol.rounds.pairing import MEETING_SHARE
from farandole.protocol.run.manifest import Manifest
from farandole.protocol.wire.errors import FarandoleError

from .figures import BYTES_PER_MBIT, duration, mbit, size
from .settings import NodeSettings
from .system.processes import has_nvidia_driver

# A run that has more parameters to a stage than machines have memory for can be cut so that it fits these.
_USUAL: Final = Machine(USUAL_RATE, USUAL_RATE, memory=USUAL_MEMORY)
# Share of a trainer's computed memory that must be there at least: the computation is not more accurate than this.
LEAST_SHARE: Final = 0.9
# With ten steps to a learning rate of 1e-3, activations grew by a third at most from step to step; with two, to 2.5
# times (8 layers of width 256).
MIN_WARMUP_OF_STAGES: Final = 20
CAPS: Final = ("--upload-mbit", "--download-mbit")


class MemoryTooSmallError(FarandoleError):
    """This machine can never hold the run's model."""


def settings_line(settings: Mapping[str, Any]) -> str:
    """Format ``{"outer.codec": "int8"}`` as ``[outer] codec = "int8"``, as in a run file."""
    sections: dict[str, list[str]] = {}
    for name, value in settings.items():
        section, _, field = name.partition(".")
        number = f"{value:g}" if isinstance(value, float) else json.dumps(value)
        sections.setdefault(section, []).append(f"{field} = {number}")
    return "; ".join(f"[{section}] {', '.join(lines)}" for section, lines in sections.items())


def settings_with_reasons(settings: Mapping[str, Any]) -> list[str]:
    """Return a line for each setting that was chosen, with the reason."""
    lines = {settings_line({name: value}): reason_for(name, value) for name, value in settings.items()}
    width = max(map(len, lines), default=0)
    return [f"{line:<{width}}  {reason}".rstrip() for line, reason in lines.items()]


def exchange_line(needs: Needs, manifest: Manifest, rate: float) -> str:
    """Describe how much of its time a contribution takes at ``rate`` bytes a second."""
    return (
        f"at {mbit(rate)} an exchange takes {needs.seconds(rate):.3g} s of the {needs.transfer_seconds:.3g} s that it "
        f"has (exchange_seconds = {manifest.rounds.exchange_seconds:g}, less the wait for the partner and the verdicts)"
    )


def unusual_needs(manifest: Manifest) -> list[str]:
    """Return warnings for the creator of a run: each need that few homes can meet, with its remedy."""
    needs, found = needs_of(manifest), []
    if needs.rate > USUAL_RATE:
        better = remedy(manifest)
        is_enough = needs_of(better).rate <= USUAL_RATE
        words = "Set" if is_enough else "Nearer to it come"
        found.append(
            f"each member needs {mbit(needs.rate)} up and down, for {size(needs.contribution_bytes)} a round: "
            f"{exchange_line(needs, manifest, USUAL_RATE)}. {words} {settings_line(changes(manifest, better))}"
        )
    if needs.on_cpu.host > USUAL_MEMORY:
        gpu, cut = needs.on_gpu, plan(manifest, _USUAL)
        settings = {name: value for name, value in changes(manifest, cut.manifest).items() if name in STAGES}
        smaller = f", or, for {size(USUAL_MEMORY)} each, set {settings_line(settings)}"
        found.append(
            f"each member needs {size(needs.on_cpu.host)} of memory, or {size(gpu.device)} on a GPU and "
            f"{size(gpu.host)} of host memory, for one sequence at a time. Have members with as much"
            + (", or train a smaller model" if cut.lacks_memory or not settings else smaller)
        )
    return found


def slow_steps(manifest: Manifest, step_seconds: float) -> str:
    """Return a warning if partners give up while they wait for this node's last inner step of a round, else nothing."""
    patience = MEETING_SHARE * manifest.rounds.exchange_seconds
    if not manifest.rounds.round_seconds or step_seconds <= patience:
        return ""
    return (
        f"an inner step takes {duration(step_seconds)} on this machine, and a partner waits {duration(patience)} for "
        f"it at the end of a round (a quarter of exchange_seconds = {manifest.rounds.exchange_seconds:g}), so some "
        "exchanges fail. Give the node a faster device, or more of this one (--threads, no other programs); the run's "
        "creator can make a run with a smaller inner.batch_size or a longer rounds.exchange_seconds"
    )


def unused_inputs(manifest: Manifest, settings: NodeSettings) -> list[str]:
    """Return a warning for each input that the user gives and this run does not take."""
    of_data = {
        "--data": settings.data,
        "--data-weight": settings.data_weight,
        "--stream": settings.stream,
        "--tokenizer": settings.tokenizer,
    }
    found = []
    if settings.trainer == "external":
        found += [(flag, "the training loop has its own data") for flag, given in of_data.items() if given]
    elif manifest.data.source == "stdlib":
        text = "this run trains on the sources of Python's standard library"
        found += [(flag, text) for flag, given in of_data.items() if given and flag != "--tokenizer"]
    if settings.trainer == "own" and settings.tokenizer and not manifest.tokenizer.sha256:
        found.append(("--tokenizer", "this run's tokens are bytes"))
    if settings.allow_model and not manifest.model.own:
        found.append(("--allow-model", "this run's model needs no code of others"))
    return [f"{flag} has no effect: {reason}" for flag, reason in found]


def memory_needed(manifest: Manifest, settings: NodeSettings) -> Memory:
    """Estimate a trainer's memory here without torch; for the smallest stage if the node chooses its stage."""
    device, stage = settings.device, settings.stage
    model = manifest.model
    stages = range(model.num_stages) if stage is None or stage >= model.num_stages else [stage]
    has_gpu = device.startswith("cuda") or (device == "auto" and has_nvidia_driver())
    needs = (needs_of_stage(manifest, each, recomputes=settings.recompute) for each in stages)
    memories = (each.memory(has_gpu=has_gpu, is_lean=settings.lean) for each in needs)
    return min(memories, key=lambda memory: memory.host)


def memory_shortfall(needed: Memory, total: int | None, available: int | None) -> str:
    """Return a remedy if other programs use too much memory now; empty if there is enough or it is unknown.

    ``total``, ``available``: bytes of `farandole.training.base.host_memory`. Raises `MemoryTooSmallError` if all of it
    is too little.
    """
    needs = f"this run's model needs {size(needed.host)} of memory here, for one sequence at a time"
    if total is not None and total < LEAST_SHARE * needed.host:
        gpu = "" if needed.device else ", or one with a GPU"
        raise MemoryTooSmallError(
            f"{needs}, and this machine (or the control group that it gives this node) has {size(total)}: take a "
            f"machine with more{gpu}, or a run of a smaller model"
        )
    if available is not None and available < needed.host:
        return f"{needs}, and {size(available)} is free: close other programs, or the system may kill the trainer"
    return ""


def line_shortfall(manifest: Manifest, upload_mbit: float, download_mbit: float) -> str:
    """Return a remedy if the bandwidth caps are too low for a run; empty if they are not. 0: no cap."""
    needs = needs_of(manifest)
    caps = zip(CAPS, (upload_mbit, download_mbit), strict=True)
    low = {flag: cap for flag, cap in caps if cap and cap * BYTES_PER_MBIT < needs.rate}
    if not low:
        return ""
    rate = min(low.values()) * BYTES_PER_MBIT
    told = " and ".join(f"{flag} {cap:g}" for flag, cap in low.items())
    chances = "only exchanges whose partner is ready early are over in time"
    if rate < needs.least_rate:
        chances = "no exchange can be over in time"
    return (
        f"this run needs {mbit(needs.rate)} up and down, more than {told}: "
        f"{exchange_line(needs, manifest, rate)}; {chances}. Raise {' and '.join(low)} to "
        f"{math.ceil(needs.rate / BYTES_PER_MBIT)} or more, or leave out the cap"
    )


def doubtful_settings(manifest: Manifest, given: Collection[str] = ()) -> list[str]:
    """Return a warning for each combination that the creator probably does not want.

    ``given``: the settings in the run file, such as ``outer.topk`` (`farandole.protocol.planning.planning.given_by`).
    """
    found = list(_doubtful_times(manifest, given))
    # The creator is a member, too.
    most = math.inf if isinstance(manifest.admission, str) else len(set(manifest.admission)) + 1
    if most < (num_stages := manifest.model.num_stages):
        found.append(
            f"admission lists {most - 1} members, and model.num_stages is {num_stages}: a node holds one stage, so "
            f"that even with the creator's {num_stages - most} of the stages have no node, and nothing is trained. "
            "List more members, or cut the model into fewer stages"
        )
    needed = {
        "outer.topk": ("outer.codec", manifest.outer.codec, "topk"),
        "inner.momentum": ("inner.optimizer", manifest.inner.optimizer, "muon"),
    }
    for name, (other, value, wanted) in needed.items():
        if name in given and value != wanted:
            found.append(
                f'{name} has no effect, because {other} is "{value}": set {other} = "{wanted}", or leave {name} out'
            )
    return found


def _doubtful_times(manifest: Manifest, given: Collection[str]) -> Iterator[str]:
    rounds, inner = manifest.rounds, manifest.inner
    if 0 < rounds.round_seconds < rounds.exchange_seconds:
        is_chosen = "rounds.round_seconds" in given and "rounds.exchange_seconds" not in given
        advice = (
            "or leave it out, and it is chosen; or send less a round, with more outer.fragments"
            if is_chosen
            else "or a shorter exchange_seconds"
        )
        yield (
            f"rounds.exchange_seconds ({rounds.exchange_seconds:g}) is longer than rounds.round_seconds "
            f"({rounds.round_seconds:g}): a member may wait longer for its partner than it trains. Set a longer "
            f"round_seconds, {advice}"
        )
    if manifest.model.external is None and inner.warmup_steps >= inner.total_steps:
        yield (
            f"inner.warmup_steps ({inner.warmup_steps}) is not less than inner.total_steps ({inner.total_steps}): the "
            "learning rate rises until the schedule ends, and is at its minimum right after. Set fewer warmup_steps, "
            "or more total_steps"
        )
    if manifest.model.num_stages > 1 and inner.warmup_steps < MIN_WARMUP_OF_STAGES:
        yield (
            f"inner.warmup_steps is {inner.warmup_steps}, and the model is in stages: without a longer warm-up, "
            "activations may double from one inner step to the next, and nodes drop what differs so much. Set "
            f"{MIN_WARMUP_OF_STAGES} or more"
        )
