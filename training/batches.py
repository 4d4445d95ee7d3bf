"""What a learner asks of its data: batches of token windows, by step, by slice, and held out."""

from __future__ import annotations

import hashlib
import os
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from .errors import DataError
from .slices import SliceQueue

_HELD_OUT_KEY: Final = b"held out"

Tokens = npt.NDArray[np.integer]
Batch = npt.NDArray[np.int64]


class Batches(Protocol):
    """Batches of one author in one run."""

    batch_size: int
    """B, sequences."""
    context: int
    """T, tokens a sequence."""

    def batch(self, step: int) -> Batch:
        """Tokens (B, T + 1) of inner step ``step``."""

    def slices(self, num_parts: int = 1) -> SliceQueue:
        """Those of this text, none of them to be drawn yet. Raises `DataError` where there are none."""

    def slice_batch(self, epoch: int, index: int) -> Batch:
        """Tokens (B, T + 1) of slice ``index`` of an epoch."""

    def held_out_batch(self, index: int) -> Batch:
        """Held-out batch number ``index``, (B, T + 1), everybody's. Raises `DataError` if there is none."""


def is_held_out(name: str, share: float) -> bool:
    """Whether the document of that name is one that nobody trains on."""
    digest = hashlib.sha256(b"farandole/held-out/1\n" + os.fsencode(name)).digest()
    return int.from_bytes(digest[:8], "big") < share * 2.0**64


def draw(length: int, count: int, *key: bytes) -> Batch:
    """``count`` numbers below ``length``, a function of the key alone. The bias, length / 2^64, is below 2^-32."""
    digest = hashlib.sha256(b"farandole/data/1")
    for part in key:
        digest.update(len(part).to_bytes(8, "little") + part)
    generator = np.random.Philox(key=int.from_bytes(digest.digest()[:16], "little"))
    raw: npt.NDArray[np.uint64] = generator.random_raw(count)
    return (raw % np.uint64(length)).astype(np.int64)


def cut_out(tokens: Tokens, starts: Batch, context: int) -> Batch:
    """Windows (B, T + 1) of tokens (n,) from starts (B)."""
    windows: Batch = tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64)
    return windows


def drawn_windows(tokens: Tokens, batch_size: int, context: int, *key: bytes) -> Batch:
    """Windows (B, T + 1) at places that follow from the key."""
    return cut_out(tokens, draw(len(tokens) - context, batch_size, *key), context)


def held_out_windows(tokens: Tokens, batch_size: int, context: int, index: int) -> Batch:
    """Windows (B, T + 1) of held-out tokens (n,), for whoever asks; raises `DataError` if these are too few."""
    if len(tokens) < context + 1:
        raise DataError(
            f"too little text is held out to measure a validation loss: {len(tokens)} tokens, and a sequence takes "
            f"{context + 1}; hold out a larger share, or name more text"
        )
    return drawn_windows(tokens, batch_size, context, _HELD_OUT_KEY, index.to_bytes(8, "little"))
