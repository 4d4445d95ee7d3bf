"""Files that are private to their owner."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

OWNER_ALONE: Final = 0o600
OWNER_ALONE_FOLDER: Final = 0o700


def open_private(path: Path, flags: int) -> int:
    """Open a file and return its descriptor; a new file is private to its owner from the start. Raises `OSError`."""
    return os.open(path, flags, OWNER_ALONE)


def others_may(path: Path) -> int:
    """Return the file's mode if users other than its owner have any permission, or else 0."""
    mode = stat.S_IMODE(path.stat().st_mode)
    return mode if mode & 0o077 else 0
