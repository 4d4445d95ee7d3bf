"""What a run asks of a member compared with what there is, in sentences for people.

`farandole run create` compares with usual homes, `farandole join` and `farandole doctor` with this one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from farandole.protocol.manifest import Manifest
from farandole.protocol.needs import USUAL_MEMORY, USUAL_RATE, Needs, needs_of
from farandole.protocol.planning import STAGES, Machine, changes, plan, remedy

from .figures import mbit, size

# A run that has more parameters to a stage than machines have memory for can be cut so that it fits these.
_USUAL: Final = Machine(USUAL_RATE, USUAL_RATE, memory=USUAL_MEMORY)


def settings_line(settings: Mapping[str, Any]) -> str:
    """``{"outer.codec": "int8"}`` as ``[outer] codec = "int8"``, as a run file has it."""
    sections: dict[str, list[str]] = {}
    for name, value in settings.items():
        section, _, field = name.partition(".")
        number = f"{value:g}" if isinstance(value, float) else json.dumps(value)
        sections.setdefault(section, []).append(f"{field} = {number}")
    return "; ".join(f"[{section}] {', '.join(lines)}" for section, lines in sections.items())


def exchange_line(needs: Needs, manifest: Manifest, rate: float) -> str:
    """What a contribution takes of its time at ``rate`` bytes a second."""
    return (
        f"at {mbit(rate)} an exchange takes {needs.seconds(rate):.3g} s of the {needs.transfer_seconds:.3g} s that it "
        f"has (exchange_seconds = {manifest.rounds.exchange_seconds:g}, less the wait for the partner and the verdicts)"
    )


def unusual_needs(manifest: Manifest) -> list[str]:
    """What the creator of a run must know: each need that few homes can meet, with its remedy."""
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
        found.append(f"each member needs {memory_line(needs)}. {_memory_remedy(manifest)}")
    return found


def memory_line(needs: Needs) -> str:
    """What a trainer takes, on the CPU and on a GPU."""
    gpu = needs.on_gpu
    return (
        f"{size(needs.on_cpu.host)} of memory, or {size(gpu.device)} on a GPU and {size(gpu.host)} beside it, "
        "for one sequence at a time"
    )


def _memory_remedy(manifest: Manifest) -> str:
    cut = plan(manifest, _USUAL)
    settings = {name: value for name, value in changes(manifest, cut.manifest).items() if name in STAGES}
    if cut.lacks_memory or not settings:
        return "Have members with as much, or train a smaller model"
    return f"Have members with as much, or, for {size(USUAL_MEMORY)} each, set {settings_line(settings)}"
