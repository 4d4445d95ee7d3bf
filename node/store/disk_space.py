"""How much of the disk a node's folder takes: at most what its owner allows; the most valuable files go last.

A node wants room for its own checkpoints, for the next one while it is written, for a copy of another node's checkpoint
and its replacement, and for its tokenised text. If that is more than the limit, the node first gives up the copy, which
others keep as well. Next it gives up its second newest checkpoint, which is the fallback if the newest is unreadable.
With less room than the newest and its replacement a node could not resume after a crash: it reports that and does not
start. Text may use the room that these two leave; tokenising fails if it needs more. The size of a download is added to
what is on the disk, and the download is refused before its weights move.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from farandole.protocol.checkpoints.blocks import BLOCK_BYTES
from farandole.protocol.run.manifest import Manifest
from farandole.protocol.run.models import stage_parameters
from farandole.protocol.run.rules import max_checkpoint_bytes, required_bytes
from farandole.protocol.wire.errors import FarandoleError
from farandole.protocol.wire.safetensors import MAX_HEADER_BYTES

from ..base.settings import NodeSettings
from .folder import KEPT, CheckpointFolder, saved_round, shortage

# Kept free in addition to what is about to be written: for the run state, the log, and other programs.
SPARE_BYTES: Final = 64 << 20
# In a node's folder in addition to checkpoints: logs and rounds of 48 MB at most (`farandole.node.base.logs`), and the
# run state of thousands of nodes.
OTHER_BYTES: Final = 128_000_000
# What a disk is taken to write, bytes a second, until a save has been measured: an old hard disk's.
SLOW_DISK: Final = 100e6
# What st_blocks counts in (stat(2)).
SECTOR: Final = 512


def save_seconds(num_bytes: int, rate: float | None = None) -> float:
    """Return the seconds to write a checkpoint; ``rate``: bytes a second, as measured, None if no save was."""
    return num_bytes / (rate or SLOW_DISK)


class DiskError(FarandoleError):
    """What is allowed is too little for this run."""


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """The files that a node keeps on its disk."""

    num_kept: int = KEPT
    """The number of its own checkpoints, in addition to one that is being written."""
    has_copy: bool = True
    """Whether it keeps a copy of another node's checkpoint."""


def plan_disk(limit: int, own_bytes: int, copy_bytes: int, text_bytes: int = 0) -> DiskPlan:
    """Plan by the sizes of an own checkpoint, of a copy, and of all tokenised text, of other runs as well.

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
    """Return the bytes that tokenised text may take: what the minimum of checkpoints leaves. None without a limit."""
    return max(0, limit - OTHER_BYTES - 2 * own_bytes) if limit else None


@dataclass(frozen=True, slots=True)
class Room:
    """The space that may be written to below a folder; without ``limit`` (bytes), what the disk has."""

    home: Path = Path()
    limit: int = 0

    def check(self, folder: Path, num_bytes: int) -> None:
        """Raise `OSError` if there is no room for ``num_bytes`` more in ``folder``. Blocks for a moment."""
        if words := shortage(folder, num_bytes + SPARE_BYTES):
            raise OSError(errno.ENOSPC, words)
        if not self.limit:
            return
        taken = used_bytes(self.home)
        if taken + num_bytes > self.limit:
            rest = max(self.limit - taken, 0) / 1e6
            raise OSError(errno.ENOSPC, f"{num_bytes / 1e6:.0f} MB of room are needed, --disk leaves {rest:.0f} MB")


def used_bytes(folder: Path) -> int:
    """Return what the files below a folder take on the disk, as ``du`` counts: without holes, and links once."""
    sizes: dict[tuple[int, int], int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                found = os.lstat(os.path.join(parent, name))
            except FileNotFoundError:  # replaced since it was listed
                continue
            sizes[found.st_dev, found.st_ino] = SECTOR * found.st_blocks
    return sum(sizes.values())


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weights of one node, by stage. Methods that read or remove files block."""

    settings: NodeSettings
    manifest: Manifest

    @property
    def num_stages(self) -> int:
        """Return the number of the model's stages; 1: it is not cut."""
        return self.manifest.model.num_stages

    @property
    def disk(self) -> int:
        """Return the maximum bytes of the node's folder; 0: no limit."""
        return round(self.settings.disk * 1e9)

    def copied_stage(self, stage: int) -> int:
        """Return the stage of which a node of ``stage`` keeps a copy."""
        return (stage + 1) % self.num_stages

    def max_bytes(self, stage: int) -> int:
        """Return the maximum bytes of a checkpoint of a stage."""
        return max_checkpoint_bytes(self.manifest.outer, stage_parameters(self.manifest.model, stage))

    def required_bytes(self, stage: int) -> int:
        """Return the bytes that a newcomer downloads of a stage, without the header."""
        return required_bytes(self.manifest.outer, stage_parameters(self.manifest.model, stage))

    def plan(self, stage: int) -> DiskPlan:
        """Plan what a node of a stage keeps on its disk. Raises `DiskError` if the minimum exceeds the limit."""
        copy_bytes = self.required_bytes(self.copied_stage(stage)) + MAX_HEADER_BYTES + BLOCK_BYTES
        text_bytes = used_bytes(self.settings.tokens) if self.disk else 0  # of a file or two
        return plan_disk(self.disk, self.max_bytes(stage), copy_bytes, text_bytes)

    def fetched(self, stage: int) -> Path:
        """Return the path of what was fetched for the trainer of a stage."""
        return self.settings.fetched(None if self.num_stages == 1 else stage)

    def rounds(self, stage: int) -> tuple[int | None, int | None]:
        """Return the rounds of the newest own checkpoint of a stage and of what was fetched; None if unreadable."""
        files = CheckpointFolder(self.settings.checkpoints, stage).files()
        own = next((found for path in files if (found := saved_round(path)) is not None), None)
        return own, saved_round(self.fetched(stage))

    def clean(self, stage: int) -> None:
        """Remove half-written files, and what the plan has no room for; call it before a trainer of a stage starts.

        Checkpoints of stages that this node has left are not in the plan. Raises `DiskError`.
        """
        CheckpointFolder(self.settings.checkpoints, stage).clean()
        if self.disk:
            for each in range(self.num_stages):
                num_kept = self.plan(stage).num_kept if each == stage else 0
                folder = CheckpointFolder(self.settings.checkpoints, each)
                folder.keep(folder.files()[:num_kept])
