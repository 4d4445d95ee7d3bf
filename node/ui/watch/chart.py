"""Curves in a terminal: eight dots a character (Unicode's braille patterns, U+2800 and on)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

from ...base.figures import loss

# A dot's bit in its character, by column and by row from the top.
_BITS: Final = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_COLUMNS, _ROWS = len(_BITS), len(_BITS[0])
_EMPTY: Final = 0x2800
# "12.345" and a space.
LABEL_WIDTH: Final = 7

Point = tuple[float, float]


def plot(points: Sequence[Point], width: int, height: int) -> list[str]:
    """The curve through the points (x growing) in ``height`` lines of ``width`` characters, its extremes at the left.

    Empty where there is nothing to draw a line through, or no room.
    """
    columns, rows = (width - LABEL_WIDTH) * _COLUMNS, height * _ROWS
    if len(points) < 2 or columns < 2 or height < 1:
        return []
    heights = _heights(points, columns)
    values = [value for value in heights if value is not None]
    low, high = min(values), max(values)
    cells = [[_EMPTY] * (columns // _COLUMNS) for _ in range(height)]
    before: int | None = None
    for column, value in enumerate(heights):
        if value is None:
            continue
        row = rows - 1 if high == low else round((high - value) / (high - low) * (rows - 1))
        reached = row if before is None else before
        for dot in range(min(row, reached), max(row, reached) + 1):
            cells[dot // _ROWS][column // _COLUMNS] |= _BITS[column % _COLUMNS][dot % _ROWS]
        before = row
    labels = [""] * height
    labels[-1] = loss(low)
    labels[0] = loss(high)
    return [f"{label:>{LABEL_WIDTH - 1}} {''.join(map(chr, line))}" for label, line in zip(labels, cells, strict=True)]


def _heights(points: Sequence[Point], columns: int) -> list[float | None]:
    """The mean of the points in each column; between them, on the line from one to the next."""
    first, last = points[0][0], points[-1][0]
    span = (last - first) or 1.0
    sums, counts = [0.0] * columns, [0] * columns
    for x, y in points:
        column = round((x - first) / span * (columns - 1))
        sums[column] += y
        counts[column] += 1
    heights = [total / count if count else None for total, count in zip(sums, counts, strict=True)]
    known = [(column, value) for column, value in enumerate(heights) if value is not None]
    for (left, start), (right, end) in itertools.pairwise(known):
        for column in range(left + 1, right):
            heights[column] = start + (end - start) * (column - left) / (right - left)
    return heights
