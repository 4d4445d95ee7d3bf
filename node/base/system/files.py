"""Files that are private to their owner, and locks that the system frees when their holder dies."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

OWNER_ALONE: Final = 0o600
OWNER_ALONE_FOLDER: Final = 0o700
_MAX_HOLDER_BYTES: Final = 32


class HeldError(Exception):
    """Another process holds the lock; the message is its process id, if it is known."""


def open_private(path: Path, flags: int) -> int:
    """Open a file and return its descriptor; a new file is private to its owner from the start. Raises `OSError`."""
    return os.open(path, flags, OWNER_ALONE)


def others_may(path: Path) -> int:
    """Return the file's mode if users other than its owner have any permission, or else 0."""
    mode = stat.S_IMODE(path.stat().st_mode)
    return mode if mode & 0o077 else 0


@contextlib.contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Hold the lock within the block. Raises `HeldError`, and `OSError` if the file cannot be made."""
    import filelock  # which takes a tenth of a second, and most commands lock nothing

    lock = filelock.FileLock(path, mode=OWNER_ALONE, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        with path.open("rb") as file:
            raise HeldError(file.read(_MAX_HOLDER_BYTES).decode("ascii", "replace").strip()) from None
    try:
        with contextlib.suppress(OSError):  # the number is for people: a full disk keeps no node from starting
            path.write_text(f"{os.getpid()}\n", encoding="ascii")
        yield
    finally:
        lock.release()
