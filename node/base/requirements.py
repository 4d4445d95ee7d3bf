"""Comparison of a run's requirements with usual homes, in sentences: for `farandole run create` and `plan`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from farandole.protocol.planning.needs import USUAL_MEMORY, USUAL_RATE, Needs, needs_of
from farandole.protocol.planning.planning import STAGES, Machine, changes, plan, reason_for, remedy
from farandole.protocol.run.manifest import Manifest
from farandole.protocol.wire.errors import ManifestError

from .figures import mbit, size

# A run that has more parameters to a stage than machines have memory for can be cut so that it fits these.
_USUAL: Final = Machine(USUAL_RATE, USUAL_RATE, memory=USUAL_MEMORY)
# With ten steps to a learning rate of 1e-3, activations grew by a third at most from step to step; with two, to 2.5
# times (8 layers of width 256).
MIN_WARMUP_OF_STAGES: Final = 20


def settings_line(settings: Mapping[str, Any]) -> str:
    """Format settings as a run file may have them in one line: ``outer.codec = "int8", rounds.overlap = true``."""
    return ", ".join(f"{name} = {json.dumps(value)}" for name, value in settings.items())


def settings_with_reasons(settings: Mapping[str, Any]) -> list[str]:
    """Return the lines of a run file's sections, each setting with the reason for its choice."""
    sections: dict[str, list[str]] = {}
    for name, value in settings.items():
        section, _, field = name.partition(".")
        reason = reason_for(name, value)
        line = f"{field} = {json.dumps(value)}" + f"  # {reason}" * bool(reason)
        sections.setdefault(section, [f"[{section}]"]).append(line)
    return [line for lines in sections.values() for line in lines]


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


def doubtful_settings(manifest: Manifest) -> Iterator[str]:
    """Yield a warning for each combination that the creator probably does not want."""
    inner = manifest.inner
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


def check_times(manifest: Manifest) -> None:
    """Raise `ManifestError` where exchanges may take longer than rounds.

    There members that agree to exchange and never do cost the others up to 45 % of their averages (simulated).
    """
    rounds = manifest.rounds
    if 0 < rounds.round_seconds < rounds.exchange_seconds:
        raise ManifestError(
            f"rounds.exchange_seconds ({rounds.exchange_seconds:g}) is longer than rounds.round_seconds "
            f"({rounds.round_seconds:g}): a member may wait longer for its partner than it trains. Set a longer "
            "round_seconds or a shorter exchange_seconds, or leave both out, and they are chosen"
        )
