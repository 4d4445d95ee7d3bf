"""The queue of slices that a trainer draws where the run counts epochs, and the slices that it has trained on.

The mesh process assigns this node's slices (`farandole.protocol.epochs.leases`) repeatedly, as far as it knows: slices
that have been drawn since are not drawn again. A slice may be trained on in several *parts*, microbatches that travel
through a model's stages. A lost part is drawn again, and the slice is done when all its parts are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ..base.errors import NoSliceError

# Ranges that were drawn lately, so that they are not drawn again when an assignment and a report cross: a node has two
# leases at a time, and a range each time that one is cut.
MAX_DRAWN = 64

Range = tuple[int, int]
"""The first of consecutive slices, and their number."""


class SliceQueue:
    """The slices of one trainer, of the ``num_slices`` of an epoch of its ``corpus``. ``num_parts``: of a slice."""

    def __init__(self, num_slices: int, corpus: bytes, num_parts: int = 1) -> None:
        self.num_slices = num_slices
        self.corpus = corpus
        self.epoch = 0
        self._num_parts = num_parts
        self._ranges: deque[Range] = deque()
        self._parts: deque[tuple[int, int]] = deque()
        self._missing: dict[int, int] = {}  # slice -> how many of its parts are not kept yet
        self._drawn: deque[Range] = deque(maxlen=MAX_DRAWN)
        self._trained: list[Range] = []

    def assign(self, epoch: int, ranges: Iterable[Range]) -> None:
        """Replace the slices to draw, in this order, without the ones already drawn; begun slices are finished."""
        if epoch != self.epoch:
            self.epoch = epoch
            for collection in (self._parts, self._missing, self._drawn, self._trained):
                collection.clear()
        self._ranges = deque(_without(ranges, self._drawn))

    @property
    def has_more(self) -> bool:
        """Return whether there is a slice to draw."""
        return bool(self._parts or self._ranges)

    def draw(self) -> tuple[int, int, int]:
        """(Epoch, slice, part) to train on next; raises `NoSliceError` if there is nothing."""
        if not self._parts:
            if not self._ranges:
                raise NoSliceError("no slice of the data is this node's now")
            first, count = self._ranges.popleft()
            if count > 1:
                self._ranges.appendleft((first + 1, count - 1))
            _append(self._drawn, first)
            self._missing[first] = self._num_parts
            self._parts.extend((first, part) for part in range(self._num_parts))
        index, part = self._parts.popleft()
        return self.epoch, index, part

    def settle(self, epoch: int, index: int, part: int, *, is_kept: bool) -> None:
        """Mark a drawn part as trained on, or as lost, which makes it available again."""
        if epoch != self.epoch or index not in self._missing:
            return
        if not is_kept:
            self._parts.appendleft((index, part))
            return
        self._missing[index] -= 1
        if not self._missing[index]:
            del self._missing[index]
            _append(self._trained, index)

    def take_trained(self) -> list[Range]:
        """Return the slices that have been trained on since the last call."""
        trained, self._trained = self._trained, []
        return trained


def _append(ranges: deque[Range] | list[Range], index: int) -> None:
    if ranges and sum(ranges[-1]) == index:
        ranges[-1] = (ranges[-1][0], ranges[-1][1] + 1)
    else:
        ranges.append((index, 1))


def _without(ranges: Iterable[Range], drawn: Iterable[Range]) -> list[Range]:
    left = list(ranges)
    for first, count in drawn:
        end = first + count
        left = [
            (a, b - a)
            for start, number in left
            for a, b in ((start, min(start + number, first)), (max(start, end), start + number))
            if a < b
        ]
    return left
