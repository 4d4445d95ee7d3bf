"""What Linux tells of itself and of its processes in /proc (proc(5)); nothing on other systems."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path
from typing import Final

from .features import HAS_PROC

_PROC: Final = Path("/proc")


def read_proc(name: str) -> str | None:
    """The text of a file there; None where there is none, or what it is about is gone."""
    if not HAS_PROC:
        return None
    try:
        return (_PROC / name).read_text(encoding="ascii", errors="replace")
    except OSError:
        return None


def write_proc(name: str, text: str) -> None:
    """Set something, where it is there and may be set."""
    if HAS_PROC:
        with contextlib.suppress(OSError):
            (_PROC / name).write_text(text, encoding="ascii")


def resident_bytes(pid: int) -> int | None:
    """A process's memory: its pages that are there (``statm``, the second number). None where nobody tells."""
    text = read_proc(f"{pid}/statm")
    return None if text is None else int(text.split()[1]) * mmap.PAGESIZE


def count_descriptors() -> int | None:
    """Files and sockets that this process has open."""
    return len(os.listdir(_PROC / "self" / "fd")) if HAS_PROC else None
