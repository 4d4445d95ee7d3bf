"""The traffic and needs of runs: the figures of ``docs/faq.md``, computed from codecs, presets and the planner."""

from __future__ import annotations

from typing import Final

from farandole.protocol.codec_sizes import encoded_bytes
from farandole.protocol.manifest import Manifest
from farandole.protocol.needs import USUAL_RATE, needs_of
from farandole.protocol.outer_rules import NoLoCoConfig
from farandole.protocol.planning import Machine, plan
from farandole.protocol.presets import PRESETS, num_parameters, preset

CODECS: Final = ("fp32", "bf16", "int8", "int4")
ROUND_SECONDS: Final = 60
"""The default length of a round, in seconds."""


def contribution_bytes(model: str, codec: str) -> int:
    """Return the bytes of one exchange, one way: a preset's whole parameters in a codec."""
    return encoded_bytes(codec, num_parameters(preset(model)))


def traffic_table() -> str:
    """Return a row for each preset: an exchange, an hour of rounds of a minute, both one way, and the line needed."""
    heads = "".join(f" {codec} |" for codec in CODECS)
    lines = [f"| model |{heads} in an hour, int8 | Mbit/s needed, int8 |", "|---" * (len(CODECS) + 3) + "|"]
    for model in PRESETS:
        sizes = "".join(f" {_size(contribution_bytes(model, codec))} |" for codec in CODECS)
        hourly = _size(contribution_bytes(model, "int8") * 3_600 // ROUND_SECONDS)
        rate = 8e-6 * needs_of(Manifest(model, preset(model), outer=NoLoCoConfig(codec="int8"))).rate
        lines.append(f"| `{model}` |{sizes} {hourly} | {rate:.{1 if rate >= 1 else 2}f} |")
    return "\n".join(lines) + "\n"


def needs_table() -> str:
    """Return a row for each preset: a member's needs, with the settings that suit a line of 20 Mbit/s."""
    lines = [
        "| model | memory, without a GPU | GPU memory | host memory, with a GPU | disk | a newcomer downloads |",
        "|---" * 6 + "|",
    ]
    for model in PRESETS:
        needs = plan(Manifest(model, preset(model)), Machine(USUAL_RATE, USUAL_RATE)).needs
        sizes = (needs.on_cpu.host, needs.on_gpu.device, needs.on_gpu.host, needs.disk_bytes, needs.join_bytes)
        lines.append(f"| `{model}` |" + "".join(f" {_size(each)} |" for each in sizes))
    return "\n".join(lines) + "\n"


def _size(num_bytes: int) -> str:
    """Format a size with three digits and a unit."""
    power = next(power for power in (1, 2, 3) if power == 3 or num_bytes < 999.5 * 1_000**power)
    return f"{num_bytes / 1_000**power:#.3g}".rstrip(".") + " " + ("kB", "MB", "GB")[power - 1]
