"""Tokenised text in a file that is mapped into memory: made once, used again by every later start.

A file's name is a hash of all that its tokens follow from: the sources by name, place, size and time of change, the
field, the tokenizer, the share that is held out. So a changed text is tokenised anew. The file is there whole or not
at all:

    tokens to train on | tokens held out | about them, JSON | length of that, 8 bytes

What is held out waits in a nameless file until the rest is written, so memory holds one document at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec
import numpy as np

from .batches import Tokens
from .durable import TEMPORARY_SUFFIX, replacing
from .errors import DataError
from .sources import Source

FORMAT: Final = "farandole/tokens/1"
SUFFIX: Final = ".tokens"
# With those of other texts: some volunteers go to and fro between two runs.
MAX_CACHES: Final = 4
_MAX_ABOUT_BYTES: Final = 4_096
_LENGTH_BYTES: Final = 8
_COPIED_BYTES: Final = 1 << 20


class Sink(Protocol):
    """Where tokens go."""

    def write(self, data: bytes, /) -> object:
        """The next ones."""


class Found(msgspec.Struct, frozen=True):
    """What came of tokenising."""

    num_documents: int
    largest: int
    """Of all tokens; -1 if there are none."""
    corpus: bytes
    """Hash of all documents with their names, in their order."""


class _About(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file says of its tokens."""

    format: str
    dtype: str
    num_training: int
    num_held_out: int
    found: Found


def cache_name(sources: Sequence[Source], *settings: object) -> str:
    """Of the file for these sources, tokenised with these settings."""
    facts = [[each.name, str(each.path.resolve()), each.kind, each.size, each.changed_at] for each in sources]
    return hashlib.sha256(msgspec.json.encode([FORMAT, settings, facts])).hexdigest()[:32] + SUFFIX


def write_cache(path: Path, dtype: np.dtype[np.integer], tokenise: Callable[[Sink, Sink], Found]) -> None:
    """Have ``tokenise`` write tokens to train on and tokens held out, and keep both at ``path``.

    Raises `DataError` if the disk will not have them, and what ``tokenise`` raises; then nothing is kept.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_remains(path.parent)
        with replacing(path) as file, tempfile.TemporaryFile(dir=path.parent) as held_out:
            found = tokenise(file, held_out)
            num_training, num_held_out = file.tell() // dtype.itemsize, held_out.tell() // dtype.itemsize
            held_out.seek(0)
            shutil.copyfileobj(held_out, file, _COPIED_BYTES)
            about = msgspec.json.encode(_About(FORMAT, dtype.str, num_training, num_held_out, found))
            file.write(about + len(about).to_bytes(_LENGTH_BYTES, "little"))
    except OSError as error:
        raise DataError(
            f"the tokenised text cannot be kept in {path.parent}: {error.strerror or error}. It takes about as much "
            "room as the text: free some, or name less text"
        ) from error
    _remove_oldest(path.parent)


def open_cache(path: Path) -> tuple[Tokens, Tokens, Found] | None:
    """Tokens to train on and tokens held out, mapped into memory; None if there is no such file, or it is damaged."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _LENGTH_BYTES))
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if not 0 < length <= min(_MAX_ABOUT_BYTES, size - _LENGTH_BYTES):
                return None
            file.seek(size - _LENGTH_BYTES - length)
            about = msgspec.json.decode(file.read(length), type=_About)
        dtype = np.dtype(about.dtype)
        num_tokens = about.num_training + about.num_held_out
        if about.format != FORMAT or num_tokens * dtype.itemsize != size - length - _LENGTH_BYTES:
            return None
        tokens = np.memmap(path, dtype, "r", shape=(num_tokens,)) if num_tokens else np.empty(0, dtype)
        with contextlib.suppress(OSError):
            os.utime(path)  # the newest are kept
    except (OSError, msgspec.MsgspecError, TypeError, ValueError):
        return None
    return tokens[: about.num_training], tokens[about.num_training :], about.found


def _remove_remains(folder: Path) -> None:
    """Of a start that was ended in the middle; a folder is one node's."""
    for path in folder.glob(f".*{SUFFIX}.*{TEMPORARY_SUFFIX}"):
        path.unlink(missing_ok=True)


def _remove_oldest(folder: Path) -> None:
    newest_first = sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in newest_first[MAX_CACHES:]:
        with contextlib.suppress(OSError):  # another process may have it mapped
            path.unlink()
