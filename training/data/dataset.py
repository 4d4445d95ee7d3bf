"""Text to batches. The position in the data is one or two numbers, so there is no state to save or resume.

Documents (`farandole.training.data.sources`) are tokenised once into one array, with a separator after each. A
volunteer's text is kept in a file that is mapped into memory (`farandole.training.data.token_cache`); files of ready
tokens are mapped where they are (`farandole.training.data.token_files`). The hash of a document's text decides whether
it is held out, so all nodes that have a document hold it out or train on it, whatever its name is; where no document of
a node's own text is, the end of the text is. Batch number ``step`` of an author consists of windows at places drawn
from a generator keyed with (run id, author, step): it is the same on every machine and in any order, and independent of
other authors' batches. The numbers come from Philox's raw output (Random123, SC'11), which numpy never changes, and not
from numpy's distributions, which it may change.

Where the run counts *epochs*, its nodes divide the text among themselves instead. It is cut into consecutive windows,
and each epoch has its own order of them (`farandole.training.base.permutation`), the same for all nodes. A *slice* is a
batch of this order, identified by epoch and number. Documents are read in the order of their sources' names, regardless
of their location. Their hash is the *corpus*: nodes with equal corpora have the same text, and only these share slices.
"""

from __future__ import annotations

import copy
import hashlib
import io
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from farandole.protocol.run.manifest import DataConfig, Manifest

from ..base.errors import DataError
from ..base.permutation import permute
from .batches import CORPUS_BYTES, Batch, Batches, Found, Parts, SliceQueue, Tokens, cut_out, is_held_out
from .sources import Document, Progress, documents_in, no_progress, sources_of, stdlib_sources
from .token_cache import cache_name, distribute, open_cache, write_cache
from .token_files import INDEX_DTYPE, index_tokens, open_tokens, require_separator, spliced
from .tokenizer import ByteTokenizer, Tokenizer, beyond_vocabulary, load_tokenizer

# Limit of the text that is held in memory if there is no cache folder; the text beyond it is not read.
MAX_TEXT_BYTES: Final = 2 * 1024**3


@dataclass(frozen=True, slots=True)
class Bring:
    """A node's own settings for its data: the locations of its text and tokenizer, and how the text is read."""

    paths: tuple[Path, ...] = ()
    """Files and folders of text or tokens, for runs whose source is ``text``."""
    field: str = "text"
    """The field of a record that has its text."""
    streams: tuple[str, ...] = ()
    """Data sets that are streamed, instead of ``paths`` (`farandole.training.data.streaming`)."""
    tokenizer: Path | None = None
    cache: Path | None = None
    """A folder for tokenised text; None: in memory."""
    cache_bytes: int | None = None
    """The limit of that folder's size; None: unlimited."""
    progress: Progress = no_progress


NOTHING: Final = Bring()
BYTES: Final = ByteTokenizer()


@dataclass(frozen=True, slots=True)
class Text:
    """Tokenised text (uint8, uint16 or uint32), split into training and held-out tokens."""

    training: Tokens
    held_out: Tokens
    found: Found


def load_text(config: DataConfig, tokenizer: Tokenizer, bring: Bring = NOTHING) -> Text:
    """Read and tokenise a run's text; for source ``text``, the text that this node brings.

    Raises `DataError` if there is none, or it cannot be read, or some of it is text and some ready tokens.
    """
    if config.source != "text":
        return text_of(documents_in(stdlib_sources(), bring.field), tokenizer, config.held_out)
    if not bring.paths:
        raise DataError(
            "this run trains on text that each node brings: name some with --data, or a data set with --stream"
        )
    sources = sources_of(bring.paths)
    ready = [source for source in sources if source.kind == "tokens"]
    if ready and len(ready) < len(sources):
        raise DataError(
            f"{ready[0].path} has ready tokens, and there is text too, perhaps the same: name one of them with --data"
        )
    if ready:  # they are mapped; their index is kept as text is
        arrays = [(source.path, open_tokens(source.path)) for source in ready]
        parts = index_tokens(arrays, tokenizer, config.held_out, bring.progress)
        if bring.cache is None:
            index = _in_memory(INDEX_DTYPE, parts)
        else:
            name = cache_name(ready, tokenizer.separator, "ready", tokenizer.identity, config.held_out)
            index = _kept(bring.cache / name, INDEX_DTYPE, parts, bring)
        for each, tokens in arrays if config.mask_documents else ():
            require_separator(each, tokens, tokenizer)
        assert isinstance(index.training, np.ndarray)
        assert isinstance(index.held_out, np.ndarray)
        return Text(spliced(arrays, index.training), spliced(arrays, index.held_out), index.found)
    documents = documents_in(sources, bring.field, bring.progress)
    if bring.cache is None:
        text = text_of(documents, tokenizer, config.held_out)
    else:
        path = bring.cache / cache_name(sources, bring.field, tokenizer.identity, config.held_out)
        text = _kept(path, _dtype_of(tokenizer), tokenise(documents, tokenizer, config.held_out), bring)
    if len(text.held_out) == 0:  # by chance, as documents are few: then the end of the text is
        cut = len(text.training) - int(config.held_out * len(text.training))
        text = replace(text, training=text.training[:cut], held_out=text.training[cut:])
    return text


def _kept(path: Path, dtype: np.dtype[np.integer], parts: Parts, bring: Bring) -> Text:
    """Return the content of a cache file, which is written first if it is not there."""
    if (opened := open_cache(path, bring.cache_bytes)) is None:
        write_cache(path, dtype, parts, bring.cache_bytes)
        if (opened := open_cache(path, bring.cache_bytes)) is None:
            raise DataError(
                f"what was just written to {path} cannot be read: check that disk, or name a folder on another one "
                "with --home"
            )
    return Text(*opened)


def text_of(documents: Iterable[Document], tokenizer: Tokenizer, held_out: float) -> Text:
    """Tokenise the first `MAX_TEXT_BYTES` of the documents in memory."""

    def first(num_bytes: int) -> Iterator[Document]:
        for document in documents:
            num_bytes -= len(document.text)
            if num_bytes < 0:
                return
            yield document

    return _in_memory(_dtype_of(tokenizer), tokenise(first(MAX_TEXT_BYTES), tokenizer, held_out))


def _in_memory(dtype: np.dtype[np.integer], parts: Parts) -> Text:
    training, held_out = io.BytesIO(), io.BytesIO()
    found = distribute(parts, training.write, held_out.write)
    return Text(np.frombuffer(training.getbuffer(), dtype), np.frombuffer(held_out.getbuffer(), dtype), found)


def _dtype_of(tokenizer: Tokenizer) -> np.dtype[np.integer]:
    return np.dtype(np.min_scalar_type(tokenizer.vocabulary - 1))


def tokenise(documents: Iterable[Document], tokenizer: Tokenizer, held_out: float) -> Parts:
    """Yield documents' tokens, with a separator after each, of which the share ``held_out`` is held out."""
    dtype = _dtype_of(tokenizer)
    separator = np.array([tokenizer.separator], dtype).tobytes()
    corpus = hashlib.sha256(b"farandole/corpus/3")
    num_documents, largest = 0, -1
    for document in documents:
        tokens = tokenizer.encode(document.text).astype(dtype)
        content = hashlib.sha256(document.text).digest()
        yield is_held_out(content, held_out), tokens.tobytes() + separator
        name = os.fsencode(document.name)
        corpus.update(len(name).to_bytes(4, "little") + name + content)
        num_documents += 1
        largest = max(largest, tokenizer.separator, int(tokens.max(initial=0)))
    return Found(num_documents, largest, corpus.digest()[:CORPUS_BYTES])


class Sampler(Batches):
    """The batches of one author in one run. It has no state except its settings.

    Raises `DataError` if the text is shorter than one window, or its tokens do not fit the model.
    """

    def __init__(
        self,
        text: Text,
        *,
        key: tuple[bytes, bytes],
        batch_size: int,
        context: int,
        vocabulary: int = 256,
        order: bytes = b"",
        tokenizer: Tokenizer = BYTES,
        is_shared: bool = False,
    ) -> None:
        """Create a sampler. ``key``: run id, author; ``order``: the run whose slice order is used; empty: this run.

        ``is_shared``: whether all nodes have the same text.
        """
        super().__init__(text.held_out, batch_size, context, tokenizer, text.training if is_shared else None)
        self._text = text
        self._key = key
        self._order = order or key[0]
        if len(text.training) < context + 1:
            raise DataError(
                f"too little text to train on: {len(text.training)} tokens in {text.found.num_documents} documents, "
                f"and a sequence takes {context + 1}; name more text with --data, or hold out less in the run file"
            )
        if text.found.largest >= vocabulary:
            raise DataError(beyond_vocabulary(text.found.largest, vocabulary))

    @property
    def corpus(self) -> bytes:
        """Implement `Batches.corpus`."""
        return self._text.found.corpus

    def of_author(self, author: bytes) -> Sampler:
        """Implement `Batches.of_author`."""
        other = copy.copy(self)
        other._key = (self._key[0], author)
        return other

    def batch(self, step: int) -> Batch:
        """Tokens (B, T + 1) of inner step ``step``."""
        key = (*self._key, step.to_bytes(8, "little"))
        return self._drawn(self._text.training, *key)

    def slices(self, num_parts: int = 1) -> SliceQueue:
        """Return the slices of this text, batches of windows that cover it; none is assigned yet."""
        return SliceQueue(-(-self._num_windows // self.batch_size), self._text.found.corpus, num_parts)

    @property
    def _num_windows(self) -> int:
        return (len(self._text.training) - 1) // self.context

    def slice_batch(self, epoch: int, index: int) -> Batch:
        """Return tokens (B, T + 1) of slice ``index`` of an epoch; the last one is padded with windows of the first."""
        places = (index * self.batch_size + np.arange(self.batch_size)) % self._num_windows
        order = permute(places, self._num_windows, self._order, epoch.to_bytes(8, "little"))
        return cut_out(self._text.training, order * self.context, self.context)


def build_sampler(manifest: Manifest, run_id: bytes, author: bytes, bring: Bring = NOTHING) -> Batches:
    """Return the batches of an author, from a run's settings and the node's own (``bring``).

    Raises `DataError` if the text or the tokenizer is unfit.
    """
    data, batch_size, model = manifest.data, manifest.inner.batch_size, manifest.model
    loaded = load_tokenizer(manifest.tokenizer, bring.tokenizer)
    if data.source == "text" and bring.streams:
        from .streaming import DataStream, StreamSampler

        return StreamSampler(
            [DataStream(name, bring.field) for name in bring.streams],
            loaded,
            data.held_out,
            key=(run_id, author),
            batch_size=batch_size,
            context=model.context,
            vocabulary=model.vocabulary,
            progress=bring.progress,
        )
    return Sampler(
        load_text(data, loaded, bring),
        key=(run_id, author),
        batch_size=batch_size,
        context=model.context,
        vocabulary=model.vocabulary,
        order=manifest.slice_order(run_id),
        tokenizer=loaded,
        is_shared=data.shares_text,
    )
