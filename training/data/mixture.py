"""Batches of several texts, each with a weight: its share of the sequences, however long it is.

Sequence i of a batch is sequence i of the same batch of one of the texts. The text is drawn from a generator keyed as
the windows are (`farandole.training.data.dataset`): by run, author and step, so a mixture's batches are the same on
every machine and in any order.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from ..base.errors import DataError
from .batches import Batch, Batches, draw
from .slices import SliceQueue
from .token_cache import CORPUS_BYTES

NO_EPOCHS: Final = (
    "this run counts epochs of the data (data.epochs), where each document is trained on once per epoch; weights "
    "(--data-weight) would repeat some documents and leave out others. Leave out the weights, or join a run without "
    "epochs"
)
# Weights are rounded to this fraction.
_UNITS: Final = 2**32


class Mixture(Batches):
    """The batches of one author, of which each text gives its share.

    ``texts``: the batches of the same author, of the same size, of each text. ``weights``: positive and finite.
    """

    def __init__(self, texts: Sequence[Batches], weights: Sequence[float], *, run_id: bytes, author: bytes) -> None:
        super().__init__(np.empty(0, np.int64), texts[0].batch_size, texts[0].context, texts[0].tokenizer)
        total = math.fsum(weights)
        self._texts = texts
        self._key = (run_id, author)
        self._ends = np.array([round(part / total * _UNITS) for part in itertools.accumulate(weights)], np.int64)
        self._ends[-1] = _UNITS

    @property
    def corpus(self) -> bytes:
        """Implement `Batches.corpus`: the hash of all texts and their shares."""
        digest = hashlib.sha256(b"farandole/corpus/mixture/1" + self._ends.astype("<i8").tobytes())
        for text in self._texts:
            digest.update(text.corpus)
        return digest.digest()[:CORPUS_BYTES]

    def of_author(self, author: bytes) -> Mixture:
        """Implement `Batches.of_author`."""
        other = copy.copy(self)
        other._texts = [text.of_author(author) for text in self._texts]
        other._key = (self._key[0], author)
        return other

    def batch(self, step: int) -> Batch:
        """Tokens (B, T + 1) of inner step ``step``."""
        return self._mixed(lambda text: text.batch(step), *self._key, step.to_bytes(8, "little"))

    def slices(self, num_parts: int = 1) -> SliceQueue:
        """Raise `DataError`: a mixture has no slices."""
        raise DataError(NO_EPOCHS)

    def held_out_batch(self, index: int) -> Batch:
        """Implement `Batches.held_out_batch`; the shares are those of the batches."""
        return self._mixed(lambda text: text.held_out_batch(index), b"held out", index.to_bytes(8, "little"))

    def _mixed(self, batch_of: Callable[[Batches], Batch], *key: bytes) -> Batch:
        """Return a batch whose sequences are from texts that the key determines."""
        chosen = np.searchsorted(self._ends, draw(_UNITS, self.batch_size, b"mixture", *key), side="right")
        batch = np.empty((self.batch_size, self.context + 1), np.int64)
        for number in np.unique(chosen):
            rows = chosen == number
            batch[rows] = batch_of(self._texts[number])[rows]
        return batch
