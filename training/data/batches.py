"""The interface of a learner's data: batches of token windows, by step, by slice, and held out; the tokens behind them.

Tokens are an array, or stretches of several (`Spliced`).
"""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ..base.errors import DataError
from ..base.permutation import keyed_digest
from .slices import SliceQueue
from .tokenizer import SEPARATORS, Tokenizer, tokens_per_byte

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


_NO_EPOCHS: Final = (
    "this run counts epochs of the data (data.epochs), and a stream has none: what is in it is not known beforehand. "
    "Save the data set and name its folder with --data, or join a run without epochs"
)
_NO_SEPARATOR: Final = (
    "this run masks documents (data.mask_documents), and its tokenizer has no token that separates them: the run's "
    f"creator must make another run, without it, or with a tokenizer that has one of {', '.join(SEPARATORS)}"
)

Tokens = Array | Spliced
Batch = npt.NDArray[np.int64]


class Batches(abc.ABC):
    """Batches of one author in one run: B sequences of T tokens, cut out of text, some of which is held out.

    ``tokenizer``: what made the tokens; None: it is not known, and neither is the number of bytes of their text.
    """

    def __init__(self, held_out: Tokens, batch_size: int, context: int, tokenizer: Tokenizer | None = None) -> None:
        self.batch_size = batch_size
        """B, sequences."""
        self.context = context
        """T, tokens a sequence."""
        self.tokenizer = tokenizer
        self._held_out = held_out
        self._ratios: dict[int, float | None] = {}

    @property
    def corpus(self) -> bytes:
        """Return the hash of the text; empty where it is not known, as for a stream."""
        return b""

    @property
    def separator(self) -> int:
        """The token after each document. Raises `DataError` if the tokenizer has none, or is not known."""
        if self.tokenizer is None or not self.tokenizer.has_separator:
            raise DataError(_NO_SEPARATOR)
        return self.tokenizer.separator

    def of_author(self, author: bytes) -> Batches:
        """Return the batches of another author with the same text. Raises `DataError` if they cannot be known."""
        raise DataError("the batches of another author are not known: its text is a stream")

    @abc.abstractmethod
    def batch(self, step: int) -> Batch:
        """Return tokens (B, T + 1) of inner step ``step``."""

    def slices(self, num_parts: int = 1) -> SliceQueue:
        """Return the slices of this text; none is assigned yet. Raises `DataError` if the text has no slices."""
        raise DataError(_NO_EPOCHS)

    def slice_batch(self, epoch: int, index: int) -> Batch:
        """Return tokens (B, T + 1) of slice ``index`` of an epoch."""
        raise DataError(_NO_EPOCHS)

    def held_out_batch(self, index: int) -> Batch:
        """Return held-out batch number ``index``, (B, T + 1): the same for every author, run and step.

        Raises `DataError` if too little is held out.
        """
        if len(self._held_out) < self.context + 1:
            raise DataError(
                f"too little text is held out to measure a validation loss: {len(self._held_out)} tokens, and a "
                f"sequence takes {self.context + 1}; hold out a larger share, or name more text"
            )
        return self._drawn(self._held_out, b"held out", index.to_bytes(8, "little"))

    def tokens_per_byte(self, num_batches: int) -> float | None:
        """Return the tokens per byte of the text of the first ``num_batches`` held-out batches; None: not known.

        See `farandole.training.data.tokenizer.tokens_per_byte`. Raises `DataError` if too little is held out.
        """
        if self.tokenizer is None:
            return None
        if num_batches not in self._ratios:  # the batches are always the same
            windows = (row for index in range(num_batches) for row in self.held_out_batch(index).tolist())
            self._ratios[num_batches] = tokens_per_byte(self.tokenizer, windows)
        return self._ratios[num_batches]

    def _drawn(self, tokens: Tokens, *key: bytes) -> Batch:
        """Return windows (B, T + 1) at places that the key determines."""
        return cut_out(tokens, draw(len(tokens) - self.context, self.batch_size, *key), self.context)


def is_held_out(content: bytes, share: float) -> bool:
    """Return whether a document with this SHA-256 is held out: no node trains on it, whatever it is called there."""
    digest = hashlib.sha256(b"farandole/held-out/1\n" + content.hex().encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2.0**64


def draw(length: int, count: int, *key: bytes) -> Batch:
    """Return ``count`` numbers below ``length``, determined by the key. The bias, length / 2^64, is below 2^-32."""
    generator = np.random.Philox(key=int.from_bytes(keyed_digest(b"farandole/data/1", key)[:16], "little"))
    raw: npt.NDArray[np.uint64] = generator.random_raw(count)
    return (raw % np.uint64(length)).astype(np.int64)


def cut_out(tokens: Tokens, starts: Batch, context: int) -> Batch:
    """Return windows (B, T + 1) of tokens (n,) from starts (B)."""
    windows: Batch = tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64)
    return windows
