"""A lock between processes that the system frees when its holder dies, however it dies.

It is flock(2) where the system has it. Elsewhere it is SQLite's lock on an empty database next to the file: SQLite uses
what each system has (sqlite.org/lockingv3.html), and its reserved lock needs nothing to be written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from .features import HAS_FILE_LOCKS
from .files import open_binary, read_at, write_at

_MAX_HOLDER_BYTES: Final = 32


class HeldError(Exception):
    """Another process holds the lock; the message is its process id, if it is known."""


@contextlib.contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Hold the lock within the block. Raises `HeldError`, and `OSError` if the file cannot be made."""
    descriptor = open_binary(path, os.O_RDWR | os.O_CREAT)
    try:
        with _lock(descriptor, path):
            with contextlib.suppress(OSError):  # the number is for people: a full disk keeps no node from starting
                os.ftruncate(descriptor, 0)
                write_at(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
            yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _lock(descriptor: int, path: Path) -> Iterator[None]:
    if sys.platform != "win32" and HAS_FILE_LOCKS:
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _held_error(descriptor) from None
        yield
        return
    with contextlib.closing(_connect(path)) as database:
        try:
            database.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                raise OSError(errno.EIO, f"{path} cannot be locked: {error}") from error
            raise _held_error(descriptor) from None
        yield


def _connect(path: Path) -> sqlite3.Connection:
    try:
        return sqlite3.connect(f"{path}.sqlite", timeout=0.0, isolation_level=None, check_same_thread=False)
    except sqlite3.OperationalError as error:
        raise OSError(errno.EIO, f"{path} cannot be locked: {error}") from error


def _held_error(descriptor: int) -> HeldError:
    return HeldError(read_at(descriptor, _MAX_HOLDER_BYTES, 0).decode("ascii", "replace").strip())
