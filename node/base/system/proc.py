"""Linux's statistics of the kernel and of processes in /proc (proc(5)); nothing on other systems."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path
from typing import Final

from .features import HAS_PROC

_PROC: Final = Path("/proc")


def read_proc(name: str) -> str | None:
    """Return the text of a file in /proc; None if it does not exist, or its process is gone."""
    if not HAS_PROC:
        return None
    try:
        return (_PROC / name).read_text(encoding="ascii", errors="replace")
    except OSError:
        return None


def write_proc(name: str, text: str) -> None:
    """Write a file in /proc, if it exists and may be written."""
    if HAS_PROC:
        with contextlib.suppress(OSError):
            (_PROC / name).write_text(text, encoding="ascii")


def resident_bytes(pid: int) -> int | None:
    """Return a process's resident bytes (second number of ``statm``). None where the system does not report them."""
    text = read_proc(f"{pid}/statm")
    return None if text is None else int(text.split()[1]) * mmap.PAGESIZE


def count_descriptors() -> int | None:
    """Count the files and sockets that this process has open."""
    return len(os.listdir(_PROC / "self" / "fd")) if HAS_PROC else None
