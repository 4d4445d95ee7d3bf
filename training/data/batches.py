"""The interface of a learner's data: batches of token windows, by step, by slice, and held out; the tokens behind them.

Tokens are an array, or stretches of several (`Spliced`).
"""

from __future__ import annotations

import abc
import hashlib
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from ..base.errors import DataError, NoSliceError
from ..base.permutation import keyed_digest
from .tokenizer import SEPARATORS, Tokenizer, tokens_per_byte

# Ranges that were drawn lately, so that they are not drawn again when an assignment and a report cross: a node has two
# leases at a time, and a range each time that one is cut.
MAX_DRAWN = 64

Range = tuple[int, int]
"""The first of consecutive slices, and their number."""


class SliceQueue:
    """The slices that a trainer draws where the run counts epochs: of ``num_slices`` of an epoch of its ``corpus``.

    The mesh process assigns this node's slices (`farandole.protocol.epochs.leases`) repeatedly, as far as it knows:
    slices that have been drawn since are not drawn again. A slice may be trained on in ``num_parts`` parts,
    microbatches that travel through a model's stages. A lost part is drawn again, and the slice is done when all its
    parts are.
    """

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
        left = list(ranges)
        for first, count in self._drawn:
            end = first + count
            left = [
                (a, b - a)
                for start, number in left
                for a, b in ((start, min(start + number, first)), (max(start, end), start + number))
                if a < b
            ]
        self._ranges = deque(left)

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


# Bytes of SHA-256: enough against accidental collisions only; a peer that lies about its text could as well not train.
CORPUS_BYTES: Final = 8

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


class Found(msgspec.Struct, frozen=True):
    """The result of tokenising."""

    num_documents: int
    largest: int
    """Of all tokens; -1 if there are none."""
    corpus: bytes
    """Hash of all documents with their names, in their order."""


Parts = Generator[tuple[bool, bytes], None, Found]
"""Tokens, or an index of some, piece by piece, each with whether it is held out."""


class Batches(abc.ABC):
    """Batches of one author in one run: B sequences of T tokens, cut out of text, some of which is held out.

    ``tokenizer``: what made the tokens. ``shared``: training text, if all nodes have the same.
    """

    def __init__(
        self, held_out: Tokens, batch_size: int, context: int, tokenizer: Tokenizer, shared: Tokens | None = None
    ) -> None:
        self.batch_size = batch_size
        """B, sequences."""
        self.context = context
        """T, tokens a sequence."""
        self.tokenizer = tokenizer
        self._held_out = held_out
        self._shared = shared
        self._ratios: dict[int, float | None] = {}

    @property
    def corpus(self) -> bytes:
        """Return the hash of the text; empty where it is not known, as for a stream."""
        return b""

    @property
    def separator(self) -> int:
        """The token after each document. Raises `DataError` if the tokenizer has none."""
        if not self.tokenizer.has_separator:
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
        self._require_held_out()
        return self._drawn(self._held_out, b"held out", index.to_bytes(8, "little"))

    def _require_held_out(self) -> None:
        if len(self._held_out) < self.context + 1:
            raise DataError(
                f"too little text is held out to measure a validation loss: {len(self._held_out)} tokens, and a "
                f"sequence takes {self.context + 1}; hold out a larger share, or name more text"
            )

    def exam(self, num_windows: int, key: bytes) -> Batch:
        """Return windows (n, T + 1) of text to judge on, which a key that no other node knows determines.

        Half of them are of training text, where all nodes have the same: there whoever likes has the held-out text too,
        and could do well on that alone. Of the training text this node has trained on no more of these windows than any
        other has. Raises `DataError` if too little is held out.
        """
        self._require_held_out()
        chance, half = np.random.default_rng(list(key)), 0 if self._shared is None else num_windows // 2
        windows = [
            cut_out(text, chance.integers(len(text) - self.context, size=count), self.context)
            for text, count in ((self._held_out, num_windows - half), (self._shared, half))
            if text is not None
        ]
        return np.concatenate(windows)

    def tokens_per_byte(self, num_batches: int) -> float | None:
        """Return the tokens per byte of the text of the first ``num_batches`` held-out batches; None: not known.

        See `farandole.training.data.tokenizer.tokens_per_byte`. Raises `DataError` if too little is held out.
        """
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
