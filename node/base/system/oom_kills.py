"""Whether it was the kernel that killed a process, for want of memory. Linux alone tells, and not of which process."""

from __future__ import annotations

from .proc import read_proc


def count_oom_kills() -> int | None:
    """Processes that the kernel has killed since it booted because memory, or that of a cgroup, was used up.

    None where nobody counts them. In a container, those of the whole machine.
    """
    lines = read_proc("vmstat")
    return next((int(line.split()[1]) for line in (lines or "").splitlines() if line.startswith("oom_kill ")), None)
