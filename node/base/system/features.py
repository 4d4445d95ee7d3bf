"""Operating system features that Windows or macOS may lack.

Features that only some systems have are used in this package alone (`tests/test_platforms.py` checks), behind these
constants; their replacements run everywhere. So tests disable features by `WITHOUT_VARIABLE`, and test on Linux what
other systems get.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Final, Literal, get_args

Feature = Literal[
    "descriptors",
    "file-locks",
    "file-modes",
    "memfd",
    "positioned-io",
    "priorities",
    "proc",
    "shared-ports",
    "sigusr1",
    "unix-sockets",
]
# For tests: features, separated by commas, or "all". The leading underscore marks that it is no setting of a node.
WITHOUT_VARIABLE: Final = "_FARANDOLE_WITHOUT"


def _without() -> frozenset[str]:
    named = frozenset(filter(None, os.environ.get(WITHOUT_VARIABLE, "").split(",")))
    known = frozenset(get_args(Feature))
    if unknown := named - known - {"all"}:
        raise ValueError(
            f"{WITHOUT_VARIABLE} names {', '.join(sorted(unknown))}; there are: {', '.join(sorted(known))}"
        )
    return known if "all" in named else named


_WITHOUT: Final = _without()
_IS_POSIX: Final = os.name == "posix"


def _has(feature: Feature, is_here: bool) -> bool:
    return is_here and feature not in _WITHOUT


HAS_UNIX_SOCKETS: Final = _has("unix-sockets", _IS_POSIX and hasattr(socket, "AF_UNIX"))
"""Sockets that are files, and so are guarded by a folder's permissions."""
INHERITS_DESCRIPTORS: Final = _has("descriptors", _IS_POSIX)
"""A child process can be given open files and sockets."""
HAS_FILE_LOCKS: Final = _has("file-locks", _IS_POSIX)
"""flock(2)."""
HAS_FILE_MODES: Final = _has("file-modes", _IS_POSIX)
"""A file's mode decides who may read it. On Windows the folder's access list does, which is the user's own."""
HAS_MEMFD: Final = _has("memfd", hasattr(os, "memfd_create"))
"""Files without a name, in memory."""
HAS_POSITIONED_IO: Final = _has("positioned-io", hasattr(os, "pread"))
"""pread(2) and pwrite(2)."""
HAS_PRIORITIES: Final = _has("priorities", hasattr(os, "nice"))
"""nice(2)."""
HAS_PROC: Final = _has("proc", sys.platform == "linux" and Path("/proc/self").exists())
"""The kernel's and processes' statistics as files (/proc)."""
SHARES_PORTS: Final = _has("shared-ports", hasattr(socket, "SO_REUSEPORT"))
"""Connections can be dialled from a port that listens, and no other user can take the port over."""
HAS_TRACEBACK_SIGNAL: Final = _has("sigusr1", hasattr(signal, "SIGUSR1") and hasattr(faulthandler, "register"))
"""A signal can make a process write its traceback, even if its Python code no longer runs."""
