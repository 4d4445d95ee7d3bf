"""Files by descriptors, the same way on every system."""

from __future__ import annotations

import os
import stat
import sys
import threading
from pathlib import Path
from typing import Final

from .features import HAS_FILE_MODES, HAS_POSITIONED_IO

# Without it Windows writes each line feed as two bytes.
_BINARY: Final = getattr(os, "O_BINARY", 0)
OWNER_ALONE: Final = 0o600
OWNER_ALONE_FOLDER: Final = 0o700
# Where reading at a position is two calls, no other thread may come between them.
_positioning = threading.Lock()


def open_binary(path: Path, flags: int) -> int:
    """Open a file and return its descriptor; a new file is private to its owner from the start. Raises `OSError`."""
    return os.open(path, flags | _BINARY, OWNER_ALONE)


def read_at(descriptor: int, size: int, position: int) -> bytes:
    """Read at most ``size`` bytes at ``position``; safe in any thread."""
    if sys.platform != "win32" and HAS_POSITIONED_IO:
        return os.pread(descriptor, size, position)
    with _positioning:
        os.lseek(descriptor, position, os.SEEK_SET)
        return os.read(descriptor, size)


def write_at(descriptor: int, data: bytes | memoryview, position: int) -> int:
    """Write at ``position``; return the number of bytes written; safe in any thread."""
    if sys.platform != "win32" and HAS_POSITIONED_IO:
        return os.pwrite(descriptor, data, position)
    with _positioning:
        os.lseek(descriptor, position, os.SEEK_SET)
        return os.write(descriptor, data)


def user_id() -> int:
    """Return this process's user id; 0 where users have no numbers."""
    if sys.platform != "win32":
        return os.getuid()
    return 0


def others_may(path: Path) -> int:
    """Return the file's mode if users other than its owner have any permission, or else 0."""
    mode = stat.S_IMODE(path.stat().st_mode)
    return mode if HAS_FILE_MODES and mode & 0o077 else 0
