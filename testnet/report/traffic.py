"""The traffic and needs of runs: the figures of ``docs/faq.md``, computed from codecs, presets and the planner."""

from __future__ import annotations

from typing import Final

from farandole.protocol.planning.needs import needs_of
from farandole.protocol.planning.planning import complete
from farandole.protocol.run.manifest import Manifest
from farandole.protocol.run.models import PRESETS, num_parameters, preset
from farandole.protocol.run.rules import encoded_bytes

CODECS: Final = ("fp32", "int8", "int4")


def home_run(model: str) -> Manifest:
    """Return the run that ``run create`` makes of a preset if a run file says nothing else."""
    return complete(Manifest(model, preset(model)), ())


def traffic_table() -> str:
    """Return a row for each preset: an exchange in some codecs, and what a run with the chosen settings sends."""
    heads = "".join(f" {codec} |" for codec in CODECS)
    lines = [f"| model |{heads} a round, chosen | seconds a round | in an hour | Mbit/s needed |"]
    lines.append("|---" * (len(CODECS) + 5) + "|")
    for model in PRESETS:
        sizes = "".join(f" {_size(encoded_bytes(codec, num_parameters(preset(model))))} |" for codec in CODECS)
        run = home_run(model)
        needs, seconds = needs_of(run), run.rounds.round_seconds
        hourly = _size(round(needs.contribution_bytes * 3_600 / seconds))
        rate = 8e-6 * needs.rate
        digits = 1 if rate >= 1 else 2
        lines.append(
            f"| `{model}` |{sizes} {_size(needs.contribution_bytes)} | {seconds:g} | {hourly} | {rate:.{digits}f} |"
        )
    return "\n".join(lines) + "\n"


def needs_table() -> str:
    """Return a row for each preset: a member's needs, with the settings that ``run create`` chooses."""
    lines = [
        "| model | memory, without a GPU | GPU memory | host memory, with a GPU | disk | a newcomer downloads |",
        "|---" * 6 + "|",
    ]
    for model in PRESETS:
        needs = needs_of(home_run(model))
        sizes = (needs.on_cpu.host, needs.on_gpu.device, needs.on_gpu.host, needs.disk_bytes, needs.join_bytes)
        lines.append(f"| `{model}` |" + "".join(f" {_size(each)} |" for each in sizes))
    return "\n".join(lines) + "\n"


def with_section(document: str, name: str, content: str) -> str:
    """Return the document with other content between its comments ``begin NAME`` and ``end NAME``."""
    begin, end = (f"<!-- {edge} {name} -->" for edge in ("begin", "end"))
    head, rest = document.split(begin)
    _, tail = rest.split(end)
    return "\n\n".join([head + begin, content.strip("\n"), end + tail])


def _size(num_bytes: int) -> str:
    """Format a size with three digits and a unit."""
    power = next(power for power in (1, 2, 3) if power == 3 or num_bytes < 999.5 * 1_000**power)
    return f"{num_bytes / 1_000**power:#.3g}".rstrip(".") + " " + ("kB", "MB", "GB")[power - 1]
