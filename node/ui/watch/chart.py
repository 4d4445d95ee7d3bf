"""Curves in a terminal: eight dots a character (Unicode's braille patterns, U+2800 and on)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from ...base.figures import loss

# A dot's bit in its character, by column and by row from the top.
_BITS: Final = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_COLUMNS, _ROWS = len(_BITS), len(_BITS[0])
_EMPTY: Final = 0x2800
# "12.345" and a space.
LABEL_WIDTH: Final = 7

Point = tuple[float, float]


def plot(points: Sequence[Point], width: int, height: int) -> list[str]:
    """Draw the points (x growing) as a curve in ``height`` lines of ``width`` characters, its extremes at the left.

    Return an empty list if there are too few points, or no room.
    """
    columns, rows = (width - LABEL_WIDTH) * _COLUMNS, height * _ROWS
    if len(points) < 2 or columns < 2 or height < 1:
        return []
    heights = _heights(points, columns)
    low, high = heights.min(), heights.max()
    dots = np.full(columns, rows - 1)
    if high > low:
        dots = np.rint((high - heights) / (high - low) * (rows - 1)).astype(int)
    cells = [[_EMPTY] * (columns // _COLUMNS) for _ in range(height)]
    for column, (before, row) in enumerate(zip([dots[0], *dots], dots, strict=False)):
        for dot in range(min(row, before), max(row, before) + 1):
            cells[dot // _ROWS][column // _COLUMNS] |= _BITS[column % _COLUMNS][dot % _ROWS]
    labels = [""] * height
    labels[-1] = loss(low)
    labels[0] = loss(high)
    return [f"{label:>{LABEL_WIDTH - 1}} {''.join(map(chr, line))}" for label, line in zip(labels, cells, strict=True)]


def _heights(points: Sequence[Point], columns: int) -> np.ndarray:
    """Return the mean of the points in each column; empty columns are interpolated."""
    xs, ys = np.array(points, dtype=float).T
    places = np.rint((xs - xs[0]) / ((xs[-1] - xs[0]) or 1.0) * (columns - 1)).astype(int)
    counts = np.bincount(places, minlength=columns)
    known = np.flatnonzero(counts)
    means = np.bincount(places, ys)[known] / counts[known]
    return np.interp(np.arange(columns), known, means)
