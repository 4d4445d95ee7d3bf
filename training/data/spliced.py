"""Stretches of several token arrays, read from where they are as if they were one array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.integer]
Places = npt.NDArray[np.int64]


class Spliced:
    """Stretches of arrays, one after the other, indexed like one array by arrays of places. Nothing is copied.

    ``stretches`` (n, 3): the array's number, the first token, and the number of tokens, at least 1.
    """

    def __init__(self, arrays: Sequence[Array], stretches: Places) -> None:
        self._arrays = arrays
        self._numbers, self._firsts, counts = np.ascontiguousarray(stretches.reshape(-1, 3).T)
        self._ends = counts.cumsum()
        self._begins = self._ends - counts

    def __len__(self) -> int:
        """Return the number of tokens in all stretches."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, places: Places | slice) -> Places:
        """Return the tokens, int64, at places of any shape. Raises `IndexError` for a place behind the last token."""
        if isinstance(places, slice):
            places = np.arange(*places.indices(len(self)))
        if places.size and not 0 <= places.min() <= places.max() < len(self):
            raise IndexError(f"there are {len(self)} tokens")
        found = np.searchsorted(self._ends, places, side="right")
        within = self._firsts[found] + places - self._begins[found]
        numbers = self._numbers[found]
        tokens = np.empty(places.shape, np.int64)
        for number in np.unique(numbers):
            chosen = numbers == number
            tokens[chosen] = self._arrays[number][within[chosen]]
        return tokens


def joined(parts: Sequence[Array | Spliced]) -> Array | Spliced:
    """Return all parts one after the other, without copying them."""
    parts = [part for part in parts if len(part)] or parts[:1]
    if len(parts) == 1:
        return parts[0]
    arrays: list[Array] = []
    stretches = []
    for part in parts:
        if isinstance(part, Spliced):
            own = np.stack([part._numbers + len(arrays), part._firsts, part._ends - part._begins], axis=1)
            arrays.extend(part._arrays)
        else:
            own = np.array([[len(arrays), 0, len(part)]], np.int64)
            arrays.append(part)
        stretches.append(own)
    return Spliced(arrays, np.concatenate(stretches))
