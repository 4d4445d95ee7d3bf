"""Formatting and parsing of numbers for people."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Final

BYTES_PER_MBIT: Final = 125_000
_BARS: Final = " ▁▂▃▄▅▆▇█"
_LARGE: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_RATE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(k|M|G)?(?:bit(?:/s)?|bps)?", re.IGNORECASE)
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(M|G|T)?(i)?B?", re.IGNORECASE)
_MULTIPLES: Final = {"k": 1, "m": 2, "g": 3, "t": 4}


def count(value: float) -> str:
    """Format a count with three figures: ``950``, ``12.3 k``, ``1.20 M``."""
    for unit, letter in _LARGE:
        if abs(value) >= unit * 0.9995:
            scaled = value / unit
            return f"{scaled:.{2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0}f} {letter}"
    return f"{value:.0f}"


def size(num_bytes: float) -> str:
    """Format a size: ``950 B``, ``1.20 MB`` (decimal, as networks count)."""
    text = count(num_bytes)
    return f"{text}B" if " " in text else f"{text} B"


def duration(seconds: float) -> str:
    """Format a duration: ``0.3 s``, ``42 s``, ``3 min 05 s``, ``2 h 10 min``, ``3 d 4 h``."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    minutes, second = divmod(total, 60)
    if minutes < 60:
        return f"{minutes} min {second:02d} s"
    hours, minute = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minute:02d} min"
    return f"{hours // 24} d {hours % 24} h"


def loss(value: float | None) -> str:
    """Format a loss with three decimals; a dash for None."""
    return "-" if value is None else f"{value:.3f}"


def bits_per_byte(value: float | None) -> str:
    """Format bits per byte as what follows a loss: `` (1.234 bits per byte)``; empty for None."""
    return "" if value is None else f" ({value:.3f} bits per byte)"


def chart(values: Sequence[float], width: int, height: int = 1) -> list[str]:
    """Draw the values as bars, from their least (low) to their largest: in lines of at most ``width`` characters."""
    if not values:
        return [""] * height
    width = max(1, min(width, len(values)))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    points = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(points), max(points)
    span = (high - low) or 1.0
    full = len(_BARS) - 1
    levels = [1 + min(int((point - low) / span * height * full), height * full - 1) for point in points]
    lines = reversed(range(height))
    return ["".join(_BARS[min(max(level - line * full, 0), full)] for level in levels) for line in lines]


def plural(number: int, noun: str) -> str:
    """Format a count with its noun: ``1 peer``, ``1,200 peers``, ``2 addresses``."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def mbit(rate: float) -> str:
    """Format a rate in bytes a second as ``20 Mbit/s``, ``0.5 Mbit/s``."""
    value = rate / BYTES_PER_MBIT
    return f"{value:.3g} Mbit/s" if value < 1_000 else f"{value:.0f} Mbit/s"


def parse_rate(text: str) -> float:
    """Return the bytes a second of ``20Mbit``, ``1 Gbit/s`` or ``20`` (Mbit/s); raise `ValueError` if it is no rate."""
    match = _RATE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ValueError(f"{text!r} is no rate: write 20Mbit, 500kbit or 1Gbit")
    return float(match[1]) * 1e3 ** _MULTIPLES[(match[2] or "M").lower()] / 8


def parse_size(text: str) -> int:
    """Return the bytes of ``24GB``, ``24GiB``, ``800MB`` or ``24`` (GB); raise `ValueError` if it is no size."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ValueError(f"{text!r} is no size: write 24GB, 24GiB or 800MB")
    base = 1_024.0 if match[3] else 1_000.0
    return int(float(match[1]) * base ** _MULTIPLES[(match[2] or "G").lower()])
