"""Files of ready tokens, mapped into memory: nanoGPT's (``train.bin``), and those of llm.c (FineWeb, Llama 3).

nanoGPT's file is uint16 tokens and nothing else (``data/*/prepare.py``). llm.c's begins with 256 int32: a magic number,
a version, and the number of tokens (``dev/data/data_common.py``). No format says which tokenizer made the tokens, so
the only check is that all of them are in the run's vocabulary.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import numpy as np

from ..base.errors import DataError
from .batches import Array

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
        size = os.stat(path).st_size
        header = _header_of(path)
        offset, dtype = (0, np.dtype("<u2")) if header is None else (_HEADER_BYTES, _dtype_of(path, header))
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


def _dtype_of(path: Path, header: tuple[int, int, int]) -> np.dtype[np.integer]:
    magic, version, _ = header
    dtype = _HEADERS.get((magic, version))
    if dtype is None:
        raise DataError(
            f"{path} has version {version} of llm.c's header {magic}, which is not known here: write its tokens as "
            "nanoGPT does, uint16 without a header"
        )
    return dtype
