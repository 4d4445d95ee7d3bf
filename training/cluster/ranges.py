"""Ranges of a flat vector: which ranks and machines have what, and the codec's blocks that begin there."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence

from ..base.errors import TrainingError
from ..outer.codec import BLOCK, slices

Range = tuple[int, int]
"""Elements of a flat vector: from, to."""


def divided(ranges: Sequence[Sequence[Range]], num_elements: int) -> list[list[Range]]:
    """Divide a flat vector among those that have these ranges of it; returns the ranges of each, ascending.

    What several have belongs to the first of them. Raises `TrainingError` if some elements are nobody's.
    """
    claims = sorted((start, each, stop) for each, own in enumerate(ranges) for start, stop in own)
    shares: list[list[Range]] = [[] for _ in ranges]
    covered = 0
    for start, each, stop in claims:
        if start > covered:
            break
        if stop > covered:
            shares[each].append((covered, stop))
            covered = stop
    if covered < num_elements:
        raise TrainingError("the ranks together lack a part of a parameter: each parameter must be sharded over all")
    return [merged(each) for each in shares]


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Return the same elements in as few ranges as possible, ascending."""
    whole: list[Range] = []
    for start, stop in sorted(ranges):
        if whole and start <= whole[-1][1]:
            whole[-1] = whole[-1][0], max(stop, whole[-1][1])
        elif start < stop:
            whole.append((start, stop))
    return whole


def common(one: Sequence[Range], other: Sequence[Range]) -> Iterator[Range]:
    """Yield what two ascending lists of separate ranges have in common, ascending."""
    first, second = 0, 0
    while first < len(one) and second < len(other):
        start, stop = max(one[first][0], other[second][0]), min(one[first][1], other[second][1])
        if start < stop:
            yield start, stop
        if one[first][1] < other[second][1]:
            first += 1
        else:
            second += 1


def without(num_elements: int, ranges: Iterable[Range]) -> Iterator[Range]:
    """Yield what a vector has besides these ascending, separate ranges, ascending."""
    end = 0
    for start, stop in ranges:
        if end < start:
            yield end, start
        end = stop
    if end < num_elements:
        yield end, num_elements


def pieces_of(ranges: Sequence[Range], part: slice) -> list[slice]:
    """Return the blocks of a part of the flat vector that begin in the ranges, as pieces relative to the part.

    A piece never crosses a boundary of `codec.slices`.
    """
    length = part.stop - part.start
    blocks: list[Range] = []
    for start, stop in ranges:
        start, stop = max(start - part.start, 0), min(stop - part.start, length)
        if start >= stop:
            continue
        first, last = -(-start // BLOCK) * BLOCK, min(-(-stop // BLOCK) * BLOCK, length)
        if first < last and blocks and blocks[-1][1] == first:
            blocks[-1] = blocks[-1][0], last
        elif first < last:
            blocks.append((first, last))
    cuts = [each.start for each in slices(length)]
    pieces = []
    for start, stop in blocks:
        inner = cuts[bisect.bisect_right(cuts, start) : bisect.bisect_left(cuts, stop)]
        edges = [start, *inner, stop]
        pieces += [slice(*edge) for edge in itertools.pairwise(edges)]
    return pieces
