"""Files of ready tokens, mapped into memory: nanoGPT's (``train.bin``), and those of llm.c (FineWeb, Llama 3).

nanoGPT's file is uint16 tokens and nothing else (``data/*/prepare.py``). llm.c's begins with 256 int32: a magic number,
a version, and the number of tokens (``dev/data/data_common.py``). No format says which tokenizer made the tokens, so
the only check is that all of them are in the run's vocabulary.

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
from .batches import CORPUS_BYTES, Array, Found, Parts, Places, Spliced, is_held_out
from .tokenizer import Tokenizer

SUFFIX: Final = ".bin"
_HEADER_BYTES: Final = 256 * 4
# llm.c's header: (magic, version) -> the tokens' type.
_HEADERS: Final[dict[tuple[int, int], np.dtype[np.integer]]] = {
    (20240520, 1): np.dtype("<u2"),
    (20240801, 7): np.dtype("<u4"),
}
_MAGICS: Final = frozenset(magic for magic, _ in _HEADERS)
# Words in the name of a file that is no training split; in a folder, such files are left out.
_OTHER_SPLITS: Final = frozenset({"val", "valid", "validation", "test"})


def is_training_split(path: Path) -> bool:
    """Return whether a file found in a folder has tokens to train on: llm.c's header or the name ``train.bin``, and no
    name of another split.
    """
    words = path.stem.lower().replace("-", "_").replace(".", "_").split("_")
    if path.suffix.lower() != SUFFIX or not _OTHER_SPLITS.isdisjoint(words):
        return False
    try:
        return "train" in words or _header_of(path) is not None
    except OSError:
        return False


def open_tokens(path: Path) -> Array:
    """Return a file's tokens (n,) uint16 or uint32, mapped into memory.

    Raises `DataError` if the file cannot be read, is cut short, or has another version of llm.c's header.
    """
    try:
        size, header = path.stat().st_size, _header_of(path)
        offset = 0
        dtype: np.dtype[np.integer] = np.dtype("<u2")
        if header is not None and header[:2] not in _HEADERS:
            raise DataError(
                f"{path} has version {header[1]} of llm.c's header {header[0]}, which is not known here: write its "
                "tokens as nanoGPT does, uint16 without a header"
            )
        if header is not None:
            offset, dtype = _HEADER_BYTES, _HEADERS[header[:2]]
        num_tokens, rest = divmod(size - offset, dtype.itemsize)
        if rest or (header is not None and header[2] != num_tokens):
            said = f"its header announces {header[2]:,} tokens" if header else "it is no whole number of uint16 tokens"
            raise DataError(
                f"{path} is no whole file of tokens: {said}, and it has {size - offset:,} bytes of them. Fetch or "
                "write it again, or leave it out"
            )
        return np.memmap(path, dtype, "r", offset, (num_tokens,)) if num_tokens else np.empty(0, dtype)
    except OSError as error:
        raise DataError(
            f"cannot read the tokens in {path}: {error.strerror or error}; check its permissions, or leave it out"
        ) from error


def _header_of(path: Path) -> tuple[int, int, int] | None:
    """Magic number, version and number of tokens in llm.c's header; None if the file has no such header."""
    with path.open("rb") as file:
        raw = file.read(_HEADER_BYTES)
    if len(raw) < _HEADER_BYTES:
        return None
    magic, version, num_tokens = (int(word) for word in np.frombuffer(raw, "<i4")[:3])
    return (magic, version, num_tokens) if magic in _MAGICS else None


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
    progress: Callable[[int, int], None],
) -> Parts:
    """Yield the index of the tokens, of which the share ``held_out`` is held out.

    ``progress`` is called with the number of bytes that were read, and that of all. Raises `DataError` if a
    token is not in the tokenizer's vocabulary.
    """

    def entry(number: int, first: int, end: int) -> bytes:
        return np.array([number, first, end - first], INDEX_DTYPE).tobytes() if end > first else b""

    corpus = hashlib.sha256(b"farandole/corpus/tokens/1")
    num_documents, largest, read, size = 0, -1, 0, sum(tokens.nbytes for _, tokens in arrays)
    for number, (path, tokens) in enumerate(arrays):
        largest = max(largest, require_vocabulary(path, tokens, tokenizer))
        is_open_out, open_first, told = False, 0, 0
        for first, separator, end in _documents(tokens, tokenizer.separator):
            if separator > first:
                content = hashlib.sha256(tokens[first:separator].astype("<u4").tobytes()).digest()
                corpus.update(content)
                num_documents += 1
                is_out = is_held_out(content, held_out)
                if is_out != is_open_out:
                    yield is_open_out, entry(number, open_first, first)
                    is_open_out, open_first = is_out, first
            if end - told >= _BLOCK_TOKENS:
                progress(read + end * tokens.itemsize, size)
                told = end
        yield is_open_out, entry(number, open_first, len(tokens))
        read += tokens.nbytes
        progress(read, size)
    return Found(num_documents, largest, corpus.digest()[:CORPUS_BYTES])


def spliced(arrays: Sequence[tuple[Path, Array]], index: Array) -> Spliced:
    """Return the tokens of an index (3 n,)."""
    stretches: Places = index.astype(np.int64).reshape(-1, 3)
    return Spliced([tokens for _, tokens in arrays], stretches)


def _documents(tokens: Array, separator: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first token, end without separator, end with it) of each document, which may be empty."""

    def cut(first: int, separator: int, end: int) -> Iterator[tuple[int, int, int]]:
        while separator - first > DOCUMENT_TOKENS:
            yield first, first + DOCUMENT_TOKENS, first + DOCUMENT_TOKENS
            first += DOCUMENT_TOKENS
        yield first, separator, end

    first = 0
    for number, block in enumerate(_blocks(tokens)):
        for place in (number * _BLOCK_TOKENS + np.flatnonzero(block == separator)).tolist():
            yield from cut(first, place, place + 1)
            first = place + 1
    if first < len(tokens):
        yield from cut(first, len(tokens), len(tokens))


def _blocks(tokens: Array) -> Iterator[Array]:
    return (tokens[begin : begin + _BLOCK_TOKENS] for begin in range(0, len(tokens), _BLOCK_TOKENS))
