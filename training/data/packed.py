"""Files of text as they are, or packed by gzip. A packed one is read a piece at a time, whatever it unpacks to."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from ..base.errors import DataError

SUFFIX: Final = ".gz"
# What else people pack text with, and how it is unpacked.
_OTHERS: Final = {".bz2": "bunzip2", ".xz": "unxz", ".zst": "unzstd", ".zip": "unzip", ".lz4": "unlz4"}


def suffix_of(path: Path) -> str:
    """Return the suffix of the unpacked file, in lower case: ``.jsonl`` for ``a.jsonl.gz``."""
    return Path(path.stem if path.suffix.lower() == SUFFIX else path).suffix.lower()


def require_readable(path: Path, suffixes: frozenset[str]) -> None:
    """Raises `DataError` for a file that would have one of these suffixes if it were unpacked by another program."""
    program = _OTHERS.get(path.suffix.lower())
    if program is not None and Path(path.stem).suffix.lower() in suffixes:
        raise DataError(
            f"{path} is packed in a way that is not read here: unpack it ({program}), pack it by gzip, or leave it out"
        )


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[io.BufferedIOBase, Callable[[], float]]]:
    """Yield the unpacked file and a function that returns the share of it that is read, 0 to 1.

    Raises `OSError`, and `DataError` where a packed file is damaged.
    """
    with path.open("rb") as raw:
        size = max(1, path.stat().st_size)

        def share() -> float:
            return min(1.0, raw.tell() / size)

        if path.suffix.lower() != SUFFIX:
            yield raw, share
            return
        try:
            with gzip.open(raw) as file:
                yield file, share
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{path} is no whole gzip file ({error}): fetch it again, or leave it out") from error
