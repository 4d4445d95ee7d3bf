"""What the system reports about its processes: psutil where it can, /proc (proc(5)) for what only Linux has."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Final

import psutil

_PROC: Final = Path("/proc")
# Linux's driver makes the first; in WSL2, Windows' driver brings the second, and there is no device of that name.
_NVIDIA_PLACES: Final = (Path("/dev/nvidiactl"), Path("/usr/lib/wsl/lib/libcuda.so.1"))


def read_proc(name: str) -> str | None:
    """Return the text of a file in /proc; None if it does not exist, or its process is gone."""
    if sys.platform != "linux":
        return None
    try:
        return (_PROC / name).read_text(encoding="ascii", errors="replace")
    except OSError:
        return None


def write_proc(name: str, text: str) -> None:
    """Write a file in /proc, if it exists and may be written."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            (_PROC / name).write_text(text, encoding="ascii")


def resident_bytes(pid: int) -> int | None:
    """Return a process's resident bytes; None if it is gone, or another user's where the system keeps that secret."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None


def count_descriptors() -> int:
    """Count the files and sockets that this process has open."""
    return int(psutil.Process().num_fds())


def count_oom_kills() -> int | None:
    """Count the processes that the kernel killed since boot because memory, or a cgroup's memory, was used up.

    None where the system does not count them (all but Linux). In a container the count is the whole machine's.
    """
    lines = read_proc("vmstat")
    return next((int(line.split()[1]) for line in (lines or "").splitlines() if line.startswith("oom_kill ")), None)


def has_nvidia_driver() -> bool:
    """Return whether the driver of an NVIDIA GPU is here, without asking it, which takes a second."""
    return any(place.exists() for place in _NVIDIA_PLACES)
