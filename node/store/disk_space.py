"""How much of the disk a node's folder takes: at most what its owner allows, with what is dearest kept to the last.

A node would like to have room for its own checkpoints, the one that is being written beside them, a copy of another's,
which is replaced by a newer one, and its text, tokenised. Where that is more than is allowed, it gives up first the
copy, which others keep as well; then its second newest checkpoint, which is for the day on which the newest cannot be
read. With less than the newest and the one that replaces it a node could not go on after a crash: it says so and does
not begin. Text has what these two leave, and is refused while it is tokenised if it takes more. What is downloaded is
measured beside what is there, and refused before its weights move.
"""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from farandole.protocol.errors import FarandoleError

from .folder import KEPT

# Beside what is about to be written: the run state, the log, and others' need.
SPARE_BYTES: Final = 64 << 20
# Beside checkpoints, in a node's folder: logs and rounds of 48 MB at most (`farandole.node.base.logs`), and the run
# state of thousands of nodes.
OTHER_BYTES: Final = 128_000_000
# What a disk is taken to write, bytes a second, until a save has been measured: an old hard disk's.
SLOW_DISK: Final = 100e6
# What st_blocks counts in, on every system that has it (stat(2)).
_SECTOR: Final = 512


def save_seconds(num_bytes: int, rate: float | None = None) -> float:
    """How long a checkpoint takes to be written; ``rate``: bytes a second, as measured, None if no save was."""
    return num_bytes / (rate or SLOW_DISK)


class DiskError(FarandoleError):
    """What is allowed is too little for this run."""


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """What a node keeps."""

    num_kept: int = KEPT
    """Of its own checkpoints, beside one that is being written."""
    has_copy: bool = True
    """Of another's."""


def plan_disk(limit: int, own_bytes: int, copy_bytes: int, text_bytes: int = 0) -> DiskPlan:
    """By the sizes of an own checkpoint, of a copy, and of all tokenised text, which may be of other runs too.

    ``limit``: bytes, 0 for none. Raises `DiskError`.
    """
    copies, others = 2 * copy_bytes, OTHER_BYTES + min(text_bytes, text_room(limit, own_bytes) or 0)
    if not limit or limit >= others + (KEPT + 1) * own_bytes + copies:
        return DiskPlan()
    for num_kept in range(KEPT, 0, -1):
        if limit >= others + (num_kept + 1) * own_bytes:
            return DiskPlan(num_kept, has_copy=False)
    least = (OTHER_BYTES + 2 * own_bytes) / 1e9
    raise DiskError(f"--disk {limit / 1e9:g} is too little: this run's checkpoints take {least:.2f} GB at least")


def text_room(limit: int, own_bytes: int) -> int | None:
    """What tokenised text may take: all that the least number of checkpoints leaves. None where there is no limit."""
    return max(0, limit - OTHER_BYTES - 2 * own_bytes) if limit else None


@dataclass(frozen=True, slots=True)
class Room:
    """What may be written below a folder; without ``limit`` (bytes), what the disk takes."""

    home: Path = Path()
    limit: int = 0

    def check(self, folder: Path, num_bytes: int) -> None:
        """Raise `OSError` if there is no room for so many bytes more in ``folder``. Blocks for a moment."""
        free = shutil.disk_usage(folder).free
        if free < num_bytes + SPARE_BYTES:
            needed = (num_bytes + SPARE_BYTES) / 1e6
            raise OSError(errno.ENOSPC, f"{needed:.0f} MB of room are needed in {folder}, {free / 1e6:.0f} MB are free")
        if not self.limit:
            return
        taken = used_bytes(self.home)
        if taken + num_bytes > self.limit:
            rest = max(self.limit - taken, 0) / 1e6
            raise OSError(errno.ENOSPC, f"{num_bytes / 1e6:.0f} MB of room are needed, --disk leaves {rest:.0f} MB")


def used_bytes(folder: Path) -> int:
    """What the files below a folder take on the disk, as ``du`` counts: without holes, and links once."""
    sizes: dict[tuple[int, int], int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                found = os.lstat(os.path.join(parent, name))
            except FileNotFoundError:  # replaced meanwhile
                continue
            sizes[found.st_dev, found.st_ino] = _SECTOR * getattr(found, "st_blocks", -(-found.st_size // _SECTOR))
    return sum(sizes.values())
