"""A cache of tokenised text: a file that is mapped into memory, created once and reused by later starts.

A file's name is a hash of everything that determines its tokens: the sources by name, path, size and modification time,
the field, the tokenizer, and the held-out share. Changed text is therefore tokenised again. The file is written
atomically:

    tokens to train on | tokens held out | about them, JSON | length of that, 8 bytes

Held-out tokens wait in an unnamed temporary file until the rest is written, so memory holds one document at a time.
Where the folder's size is limited, files of other texts are deleted first, and what still does not fit is refused
before it is written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from ..base.durable import TEMPORARY_SUFFIX, replacing
from ..base.errors import DataError
from .batches import Found, Parts, Tokens
from .sources import TextSource

FORMAT: Final = "farandole/tokens/2"
SUFFIX: Final = ".tokens"
# Number of files kept: some volunteers alternate between two runs.
MAX_CACHES: Final = 4
_MAX_ABOUT_BYTES: Final = 4_096
_LENGTH_BYTES: Final = 8
_COPIED_BYTES: Final = 1 << 20


class _About(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file's metadata on its tokens."""

    format: str
    dtype: str
    num_training: int
    num_held_out: int
    found: Found


def cache_name(sources: Sequence[TextSource], *settings: object) -> str:
    """Return the name of the file for these sources, tokenised with these settings."""
    facts = [[each.name, str(each.path.resolve()), each.kind, each.size, each.changed_at] for each in sources]
    return hashlib.sha256(msgspec.json.encode([FORMAT, settings, facts])).hexdigest()[:32] + SUFFIX


class _Allowance:
    """The allowance of all files in a folder: `MAX_CACHES` files, of ``max_bytes`` in all (None: unlimited).

    The others make room for the newest, the oldest first.
    """

    def __init__(self, newest: Path, max_bytes: int | None) -> None:
        others = {path: path.stat() for path in newest.parent.glob(f"*{SUFFIX}") if path != newest}
        self._oldest_first = deque(sorted(others, key=lambda path: others[path].st_mtime_ns))
        self._max_bytes = max_bytes
        self._taken = sum(about.st_size for about in others.values())
        while len(self._oldest_first) >= MAX_CACHES:
            self._remove_oldest()

    def _remove_oldest(self) -> None:
        oldest = self._oldest_first.popleft()
        with contextlib.suppress(OSError):  # another process may have it mapped
            size = oldest.stat().st_size
            oldest.unlink()
            self._taken -= size

    def take(self, num_bytes: int) -> None:
        """Reserve ``num_bytes`` before they are written. Raises `DataError` if there is no room for them."""
        self._taken += num_bytes
        if self._max_bytes is None:
            return
        while self._taken > self._max_bytes and self._oldest_first:
            self._remove_oldest()
        if self._taken > self._max_bytes:
            raise DataError(
                f"the tokenised text takes more than the {self._max_bytes / 1e6:,.1f} MB that --disk leaves for it: "
                "allow more, or name less text"
            )


def distribute(parts: Parts, training: Callable[[bytes], object], held_out: Callable[[bytes], object]) -> Found:
    """Write each part to where it belongs."""
    while True:
        try:
            is_held_out, data = next(parts)
        except StopIteration as end:
            found: Found = end.value
            return found
        (held_out if is_held_out else training)(data)


def write_cache(path: Path, dtype: np.dtype[np.integer], parts: Parts, max_bytes: int | None) -> None:
    """Keep all parts at ``path``.

    ``max_bytes``: what the folder may take, with files of other texts, which go where there is no room for all. Raises
    `DataError` if that is too little or the disk will not have them, and what ``parts`` raises; then nothing is kept.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for remains in path.parent.glob(f".*{SUFFIX}.*{TEMPORARY_SUFFIX}"):  # of an interrupted start of this node
            remains.unlink(missing_ok=True)
        allowance = _Allowance(path, max_bytes)
        with replacing(path) as file, tempfile.TemporaryFile(dir=path.parent) as held_out:

            def keep(data: bytes) -> None:
                allowance.take(len(data))
                file.write(data)

            def hold_out(data: bytes) -> None:
                allowance.take(2 * len(data))  # both copies are on the disk in the end
                held_out.write(data)

            found = distribute(parts, keep, hold_out)
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


def open_cache(path: Path, max_bytes: int | None) -> tuple[Tokens, Tokens, Found] | None:
    """Tokens to train on and tokens held out, mapped into memory; None if there is no such file, or it is damaged.

    Files of other texts go if the folder takes more than ``max_bytes``; raises `DataError` if this file does.
    """
    if max_bytes is not None and path.exists():
        _Allowance(path, max_bytes).take(path.stat().st_size)
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
