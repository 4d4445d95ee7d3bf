"""The split of ready tokens into documents, some of which are held out.

A document is what is between two separators of the run's tokenizer: llm.c writes one before each document, nanoGPT one
after it. Longer documents are cut, as text is. The hash of a document's tokens decides whether it is held out, so it is
held out in any file. The result is an *index*, a few bytes for each held-out document, which is kept in the node's
token cache (`farandole.training.data.token_cache`); the tokens are read from the files themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from ..base.errors import DataError
from .batches import Array, Places, Spliced, is_held_out
from .token_cache import CORPUS_BYTES, Found, Sink
from .tokenizer import Tokenizer

# Longer documents become several, so that a file without separators has held-out parts too: 64 KiB of uint16.
DOCUMENT_TOKENS: Final = 32 * 1024
INDEX_DTYPE: Final = np.dtype("<i8")
"""Of an index: (array's number, first token, number of tokens) for each stretch."""

# Tokens that are looked through at a time: temporaries of some 100 MB.
_BLOCK_TOKENS: Final = 1 << 24
# Vocabulary of GPT-2, whose uint16 files are the most common ones.
_GPT2_TOKENS: Final = 50_257


def require_vocabulary(path: Path, tokens: Array, tokenizer: Tokenizer) -> int:
    """Return the largest token, -1 if there is none. Raises `DataError` if the run's tokenizer does not have it."""
    largest = max((int(block.max()) for block in _blocks(tokens)), default=-1)
    if largest >= tokenizer.vocabulary:
        kind = "a token is a byte" if tokenizer.identity == "bytes" else "the run's tokenizer file decides"
        like = " (GPT-2's has 50,257)" if tokenizer.vocabulary < largest + 1 <= _GPT2_TOKENS else ""
        raise DataError(
            f"{path} was made with another tokenizer: it has token {largest:,}, and this run has only the tokens 0 to "
            f"{tokenizer.vocabulary - 1:,} ({kind}). Join a run whose [tokenizer] is the one that made this "
            f"file{like}, or name the text itself with --data"
        )
    return largest


def require_separator(path: Path, tokens: Array, tokenizer: Tokenizer) -> None:
    """Raise `DataError` unless a file of tokens has the tokenizer's separator: then its documents are not known."""
    if not any((block == tokenizer.separator).any() for block in _blocks(tokens)):
        raise DataError(
            f"this run masks documents (data.mask_documents), and {path} does not separate them: it never has token "
            f"{tokenizer.separator:,}, the separator of the run's tokenizer. Write it again with this token after each "
            "document, or name the text itself with --data"
        )


def index_tokens(
    arrays: Sequence[tuple[Path, Array]],
    tokenizer: Tokenizer,
    held_out: float,
    training_sink: Sink,
    held_out_sink: Sink,
    tell_progress: Callable[[int], None] = lambda num_bytes: None,
) -> Found:
    """Write the index of the tokens to train on to one sink, that of the share ``held_out`` to the other.

    ``tell_progress`` is called with the number of bytes that were read since the last call. Raises `DataError` if a
    token is not in the tokenizer's vocabulary.
    """
    corpus = hashlib.sha256(b"farandole/corpus/tokens/1")
    num_documents, largest = 0, -1
    sinks = (training_sink, held_out_sink)
    for number, (path, tokens) in enumerate(arrays):
        largest = max(largest, require_vocabulary(path, tokens, tokenizer))
        open_split, open_first, told = False, 0, 0
        for first, separator, end in _documents(tokens, tokenizer.separator):
            if separator > first:
                content = hashlib.sha256(tokens[first:separator].astype("<u4").tobytes()).digest()
                corpus.update(content)
                num_documents += 1
                is_out = is_held_out(content, held_out)
                if is_out != open_split:
                    _write(sinks[open_split], number, open_first, first)
                    open_split, open_first = is_out, first
            if end - told >= _BLOCK_TOKENS:
                tell_progress((end - told) * tokens.itemsize)
                told = end
        _write(sinks[open_split], number, open_first, len(tokens))
        tell_progress((len(tokens) - told) * tokens.itemsize)
    return Found(num_documents, largest, corpus.digest()[:CORPUS_BYTES])


def spliced(arrays: Sequence[tuple[Path, Array]], index: Array) -> Spliced:
    """Return the tokens of an index (3 n,)."""
    stretches: Places = index.astype(np.int64).reshape(-1, 3)
    return Spliced([tokens for _, tokens in arrays], stretches)


def _write(sink: Sink, number: int, first: int, end: int) -> None:
    if end > first:
        sink.write(np.array([number, first, end - first], INDEX_DTYPE).tobytes())


def _documents(tokens: Array, separator: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first token, end without separator, end with it) of each document, which may be empty."""
    first = 0
    for begin, block in _numbered_blocks(tokens):
        for found in np.flatnonzero(block == separator).tolist():
            place = begin + found
            yield from _cut(first, place, place + 1)
            first = place + 1
    if first < len(tokens):
        yield from _cut(first, len(tokens), len(tokens))


def _cut(first: int, separator: int, end: int) -> Iterator[tuple[int, int, int]]:
    while separator - first > DOCUMENT_TOKENS:
        yield first, first + DOCUMENT_TOKENS, first + DOCUMENT_TOKENS
        first += DOCUMENT_TOKENS
    yield first, separator, end


def _blocks(tokens: Array) -> Iterator[Array]:
    return (block for _, block in _numbered_blocks(tokens))


def _numbered_blocks(tokens: Array) -> Iterator[tuple[int, Array]]:
    for begin in range(0, len(tokens), _BLOCK_TOKENS):
        yield begin, tokens[begin : begin + _BLOCK_TOKENS]
