"""What this node takes of its machine: so that a leak is seen before it matters."""

from __future__ import annotations

import os
from pathlib import Path

import trio

from .status import Resources

_PROC = Path("/proc")


def measure_resources(trainer_pid: int | None) -> Resources | None:
    """Of this process, in which trio runs, and of its trainer; None where there is no /proc (macOS)."""
    own = _PROC / str(os.getpid())
    memory = _resident_bytes(own)
    if memory is None:
        return None
    return Resources(
        memory=memory,
        trainer_memory=None if trainer_pid is None else _resident_bytes(_PROC / str(trainer_pid)),
        descriptors=len(os.listdir(own / "fd")),
        tasks=trio.lowlevel.current_statistics().tasks_living,
    )


def _resident_bytes(process: Path) -> int | None:
    """Its pages in memory (proc(5), ``statm``, the second number); None if it is gone."""
    try:
        return int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None
