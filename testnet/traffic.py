"""What a run's exchanges send: the figures of ``docs/faq.md``, from the codecs and presets themselves."""

from __future__ import annotations

from typing import Final

from farandole.protocol.presets import PRESETS, num_parameters, preset
from farandole.training.codec import encoded_size

CODECS: Final = ("fp32", "bf16", "int8", "int4")
ROUND_SECONDS: Final = 60
"""The default length of a round, in seconds."""


def contribution_bytes(model: str, codec: str) -> int:
    """Of one exchange, one way: a preset's whole parameters in a codec."""
    return encoded_size(codec, num_parameters(preset(model)))


def traffic_table() -> str:
    """A row for each preset: what one exchange sends, and what rounds of a minute make of it in an hour, one way."""
    heads = "".join(f" {codec} |" for codec in CODECS)
    lines = [f"| model |{heads} in an hour, int8 | Mbit/s, int8 |", "|---" * (len(CODECS) + 3) + "|"]
    for model in PRESETS:
        sizes = "".join(f" {_size(contribution_bytes(model, codec))} |" for codec in CODECS)
        int8 = contribution_bytes(model, "int8")
        hourly, rate = _size(int8 * 3_600 // ROUND_SECONDS), int8 * 8 / ROUND_SECONDS / 1e6
        lines.append(f"| `{model}` |{sizes} {hourly} | {rate:.{1 if rate >= 1 else 2}f} |")
    return "\n".join(lines) + "\n"


def _size(num_bytes: int) -> str:
    """Three digits, as people say them."""
    power = min(max((len(str(num_bytes)) - 1) // 3, 1), 3)
    return f"{num_bytes / 1_000**power:#.3g}".rstrip(".") + " " + ("kB", "MB", "GB")[power - 1]
