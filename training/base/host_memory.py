"""The memory that this process can get, in total and now: from the machine, and from its control groups.

A container's limit is a control group's: the kernel kills a process beyond it, even if the machine has plenty. Both
versions of Linux' control groups are read (Documentation/admin-guide/cgroup-v1/memory.rst, cgroup-v2.rst), and of each
the groups above, whose limits hold as well. Within a container its group is often mounted as if it were the root.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

# Of version 1 and of version 2: where the hierarchy is mounted, the files with the limit and with what is in use, and
# what of that is file cache, which the kernel gives back first.
_VERSION_1: Final = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2: Final = ("", "memory.max", "memory.current", "inactive_file")


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes available without swapping or killing; None if unknown. The system promises more than it has.

    ``root``: where ``proc`` and ``sys`` are.
    """
    return min([*_of_machine(root, "MemAvailable:"), *(room for room, _ in _of_groups(root))], default=None)


def total_bytes(root: Path = Path("/")) -> int | None:
    """Return the most bytes that this process could get if nothing else ran; None if unknown."""
    return min([*_of_machine(root, "MemTotal:"), *(limit for _, limit in _of_groups(root))], default=None)


def _of_machine(root: Path, wanted: str) -> Iterator[int]:
    for name, *values in map(str.split, _lines(root / "proc/meminfo")):
        if name == wanted:
            yield 1_024 * int(values[0])


def _of_groups(root: Path) -> Iterator[tuple[int, int]]:
    """The room in each control group with a limit that this process is in, and the limit."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, limit, usage, cache = _VERSION_1 if controllers else _VERSION_2
        top = root / "sys/fs/cgroup" / mount
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder == top or top in folder.parents:
                yield from _room(folder / limit, folder / usage, folder / "memory.stat", cache)


def _room(limit: Path, usage: Path, stat: Path, cache: str) -> Iterator[tuple[int, int]]:
    """Yield nothing where there is no limit (version 2 says "max"), or no such group in this mount."""
    limits, used = _lines(limit), _lines(usage)
    if limits and used and limits[0].isdigit():
        counts = dict(line.split()[:2] for line in _lines(stat) if line.strip())
        most = int(limits[0])
        yield max(0, most - int(used[0]) + int(counts.get(cache, 0))), most


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # another system, or a group that this container does not see
        return []
