"""Processes that the kernel killed for lack of memory. Only Linux counts them, and without naming the process."""

from __future__ import annotations

from .proc import read_proc


def count_oom_kills() -> int | None:
    """Count the processes that the kernel killed since boot because memory, or a cgroup's memory, was used up.

    None where the system does not count them. In a container the count is the whole machine's.
    """
    lines = read_proc("vmstat")
    return next((int(line.split()[1]) for line in (lines or "").splitlines() if line.startswith("oom_kill ")), None)
