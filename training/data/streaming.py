"""Endless training on a Hugging Face data set while it is downloaded; a separate thread makes the batches.

Only what the volunteer names is downloaded, and no data set's code is run: `datasets` has refused any since release 4.

A stream has no places to draw from. So each node reads the data set's shards in an order of its own, its documents
shuffled a thousand at a time; of one with few shards, it also begins at a place of its own. After a restart it reads in
another order again: what was read before is not counted. So a stream has no epochs, and there is nothing to share.

Held out are the same documents everywhere, by the hash of their text; the first ones of the data set, in its own order,
make up what the loss is measured on.
"""

from __future__ import annotations

import hashlib
import itertools
import queue
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from ..base.errors import DataError, how_to_add
from ..base.permutation import keyed_digest
from .batches import Batch, Batches, is_held_out
from .sources import Progress, no_column
from .tokenizer import Tokenizer, beyond_vocabulary

if TYPE_CHECKING:
    from datasets import IterableDataset

# Documents that are shuffled among each other: a few megabytes.
SHUFFLED_DOCUMENTS: Final = 1_000
# In a data set with fewer than `FEW_SHARDS`, a node skips up to `MAX_SKIPPED` documents, so that nodes read different
# parts at the same time.
FEW_SHARDS: Final = 32
MAX_SKIPPED: Final = 20_000
# Batches that are ready before they are wanted: downloads come in bursts.
NUM_READY: Final = 8
# What the loss is measured on, in sequences, and the most documents that are looked through for it.
HELD_OUT_SEQUENCES: Final = 256
MAX_LOOKED_THROUGH: Final = 50_000
_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]+)?", re.ASCII)
_SPLIT: Final = "train"


class DataStream:
    """A data set by its name on the Hugging Face Hub (``OWNER/NAME``, ``OWNER/NAME:CONFIG``), or a folder that has one.

    ``field`` has the text. Raises `DataError` if there is no such data set, or it cannot be read without its own code.
    """

    def __init__(self, name: str, field: str) -> None:
        self.name = name
        self._field = field
        self._dataset = _open(name)
        columns = self._dataset.column_names
        if columns is not None and field not in columns:
            raise DataError(no_column(name, field, columns))

    def shuffled(self, *key: bytes) -> Iterator[bytes]:
        """Texts in an order that follows from the key."""
        digest = keyed_digest(b"farandole/stream/1", key)
        seed, skipped = (int.from_bytes(digest[at : at + 4], "little") for at in (0, 4))
        shuffled = self._dataset.shuffle(seed=seed, buffer_size=SHUFFLED_DOCUMENTS)
        if self._dataset.num_shards >= FEW_SHARDS:
            return self.documents(shuffled)
        return self._from(shuffled, skipped % MAX_SKIPPED)

    def _from(self, dataset: IterableDataset, skipped: int) -> Iterator[bytes]:
        """Skip the first ``skipped`` texts; if there are fewer, skip ``skipped`` modulo their number."""
        num_texts = 0
        for num_texts, text in enumerate(self.documents(dataset), 1):
            if num_texts > skipped:
                yield text
        if 0 < num_texts <= skipped:
            yield from itertools.islice(self.documents(dataset), skipped % num_texts, None)

    def documents(self, shuffled: IterableDataset | None = None) -> Iterator[bytes]:
        """Texts in the data set's own order, or `shuffled`; raises `DataError` when it cannot be read any more."""
        try:
            for row in self._dataset if shuffled is None else shuffled:
                if self._field not in row:
                    raise DataError(no_column(self.name, self._field, row))
                text = row[self._field]
                if not isinstance(text, str | None):
                    raise DataError(f"{self.name}: the column {self._field!r} is no text: name one with --data-field")
                if text:
                    yield text.encode(errors="replace")
        except DataError:
            raise
        except Exception as error:  # the package raises whatever its parsers and the network do
            raise DataError(
                f"{self.name} cannot be read on ({type(error).__name__}: {error}). Check the connection to its host"
            ) from error


def is_data_set(name: str) -> bool:
    """Return whether ``name`` has the form of a data set's name, or is a folder."""
    return _NAME.fullmatch(name) is not None or (bool(name) and Path(name).is_dir())


def _open(name: str) -> IterableDataset:
    if not is_data_set(name):
        raise DataError(
            f"--stream {name}: this is neither a folder nor OWNER/NAME or OWNER/NAME:CONFIG on the Hugging Face Hub"
        )
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(f"--stream needs the Python package 'datasets': {how_to_add('data')}") from error
    path, _, config = (name, "", "") if Path(name).is_dir() else name.partition(":")
    try:
        return load_dataset(path, config or None, split=_SPLIT, streaming=True)
    except Exception as error:  # the package raises whatever its parsers and the network do
        if "scripts are no longer supported" in str(error):
            raise DataError(
                f"{name} is made by a script of its own. farandole runs no code of a data set: take a version of it in "
                "Parquet (on the Hub, most have one as the revision refs/convert/parquet)"
            ) from error
        raise DataError(
            f"the data set {name} cannot be opened: {error}. Check its name on the Hugging Face Hub, and the connection"
        ) from error


def read_held_out(
    streams: Sequence[DataStream], tokenizer: Tokenizer, share: float, num_tokens: int, progress: Progress
) -> Batch:
    """Return tokens (n,) of the first held-out documents: at least ``num_tokens`` of each stream, if it has them."""
    parts = [np.empty(0, np.int64)]
    for stream in streams if share else ():
        found = 0
        for number, text in enumerate(stream.documents()):
            if found >= num_tokens or number >= MAX_LOOKED_THROUGH:
                break
            if is_held_out(hashlib.sha256(text).digest(), share):
                parts.append(np.append(tokenizer.encode(text).astype(np.int64), tokenizer.separator))
                found += len(parts[-1])
                progress(min(found, num_tokens), num_tokens)
    return np.concatenate(parts)


class StreamSampler(Batches):
    """Batches of consecutive windows of what streams give, without slices.

    Another step's batch is the next one, whatever its number; the same step's is the same. ``key`` (run id, author) and
    the first step decide the order.
    """

    def __init__(
        self,
        streams: Sequence[DataStream],
        tokenizer: Tokenizer,
        share: float,
        *,
        key: tuple[bytes, bytes],
        batch_size: int,
        context: int,
        vocabulary: int,
        progress: Progress,
    ) -> None:
        wanted = HELD_OUT_SEQUENCES * (context + 1)
        super().__init__(read_held_out(streams, tokenizer, share, wanted, progress), batch_size, context, tokenizer)
        self._streams = streams
        self._share = share
        self._vocabulary = vocabulary
        self._key = key
        self._ready: queue.Queue[Batch | DataError] | None = None
        self._step = -1
        self._batch: Batch

    def batch(self, step: int) -> Batch:
        """Tokens (B, T + 1) of inner step ``step``. Raises `DataError` if there are no more to be had."""
        if step == self._step:
            return self._batch
        if self._ready is None:
            self._ready = queue.Queue(NUM_READY)
            key = (*self._key, step.to_bytes(8, "little"))
            threading.Thread(target=self._read, args=(self._ready, key), name="stream", daemon=True).start()
        batch = self._ready.get()
        if isinstance(batch, DataError):
            self._ready = None
            raise batch
        self._batch, self._step = batch, step
        return batch

    def _read(self, ready: queue.Queue[Batch | DataError], key: tuple[bytes, ...]) -> None:
        """Read batches in a separate thread, until the process ends.

        A batch's windows lie one behind the other, each with the first token of the next.
        """
        try:
            size = self.batch_size * self.context + 1
            places = np.arange(self.batch_size)[:, None] * self.context + np.arange(self.context + 1)
            tokens = np.empty(0, np.int64)
            for part in self._parts(key):
                tokens = np.concatenate([tokens, part])
                while len(tokens) >= size:
                    ready.put(tokens[places])
                    tokens = tokens[size - 1 :]
        except DataError as error:
            ready.put(error)
        except Exception as error:  # without a word, the trainer would wait for ever
            ready.put(DataError(f"the stream broke off ({type(error).__name__}: {error})"))

    def _parts(self, key: tuple[bytes, ...]) -> Iterator[Batch]:
        """Yield documents' tokens, pass after pass, one document of each stream in turn as long as it has any."""
        for number in itertools.count():
            passes = [stream.shuffled(*key, number.to_bytes(8, "little")) for stream in self._streams]
            is_empty = True
            for text in filter(None, itertools.chain.from_iterable(itertools.zip_longest(*passes))):
                if is_held_out(hashlib.sha256(text).digest(), self._share):
                    continue
                is_empty = False
                tokens = np.append(self.tokenizer.encode(text).astype(np.int64), self.tokenizer.separator)
                if (largest := int(tokens.max())) >= self._vocabulary:
                    raise DataError(beyond_vocabulary(largest, self._vocabulary))
                yield tokens
            if is_empty:
                names = ", ".join(each.name for each in self._streams)
                raise DataError(f"there is no text to train on in {names}: name another data set with --stream")
