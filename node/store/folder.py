"""The folder with a node's own checkpoints.

    stage-0-round-41.safetensors            written by this node's trainer, or a peer's that it resumed from
    stage-0-round-41.safetensors.index      the hashes of its blocks, signed; made after it
    .stage-0-round-42.safetensors.*.tmp     being written, or left by a process that was killed during a save
    copy-1-<id>.blocks, …blocks.index       the beginning of another node's, kept for others (`library`)
    stage-0-peers.msgpack                   what the screening rule remembers of peers

Stage 0 is also the whole model of a run without stages. A file under its final name is never written to: a new one
gets its name once it is durable, and only then are older ones removed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open

from farandole.protocol.checkpoints.blocks import decode_signed_index, max_index_bytes
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.training.base.durable import TEMPORARY_SUFFIX

# The newest, and the one before it as a fallback if the newest cannot be read.
KEPT: Final = 2
_NAME: Final = re.compile(r"stage-(\d{1,5})-round-(\d{1,16})\.safetensors")
_INDEX_SUFFIX: Final = ".index"


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """One stage's checkpoints, in a folder that may hold other stages' too, or may not exist yet."""

    path: Path
    stage: int

    def file(self, round_index: int) -> Path:
        """Return the path of the checkpoint of a round."""
        return self.path / f"stage-{self.stage}-round-{round_index}.safetensors"

    @property
    def histories(self) -> Path:
        """Return the path of the screening rule's histories of peers, if it keeps any."""
        return self.path / f"stage-{self.stage}-peers.msgpack"

    def files(self) -> list[Path]:
        """Return all checkpoints of this stage, the newest first."""
        found = ((_NAME.fullmatch(path.name), path) for path in self._entries())
        own = [(int(match[2]), path) for match, path in found if match and int(match[1]) == self.stage]
        return [path for _, path in sorted(own, reverse=True)]

    def keep(self, kept: Collection[Path]) -> None:
        """Remove all others of this stage. A file that cannot be removed stays until the next call."""
        for path in self.files():
            if path not in kept:
                with contextlib.suppress(OSError):
                    index_of(path).unlink(missing_ok=True)
                    path.unlink(missing_ok=True)

    def trim(self, num_kept: int) -> None:
        """Remove all but the ``num_kept`` newest checkpoints of this stage."""
        self.keep(self.files()[:num_kept])

    def clean(self) -> None:
        """Remove what trainers that were killed during a save left behind; call it only while no trainer saves."""
        for path in self._entries():
            is_half = path.name.startswith(f".stage-{self.stage}-") and path.suffix == TEMPORARY_SUFFIX
            is_index = path.suffix == _INDEX_SUFFIX and _NAME.fullmatch(path.stem) is not None
            is_orphan = is_index and not path.with_suffix("").exists()
            if is_half or is_orphan:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)

    def _entries(self) -> list[Path]:
        try:
            return list(self.path.iterdir())
        except FileNotFoundError:
            return []


def index_of(checkpoint: Path) -> Path:
    """Return the path of a checkpoint's index."""
    return checkpoint.with_name(checkpoint.name + _INDEX_SUFFIX)


def known_hashes(checkpoint: Path, run_id: bytes) -> bytes:
    """Return the hashes of a checkpoint's blocks from its index; empty if there is no readable index."""
    try:
        size = checkpoint.stat().st_size
        with index_of(checkpoint).open("rb") as file:
            raw = file.read(max_index_bytes(size) + 1)
        return decode_signed_index(raw, run_id, size)[1].hashes
    except (OSError, RemoteProtocolError):
        return b""


def saved_round(checkpoint: Path) -> int | None:
    """Return the round of a checkpoint, None if there is no readable one; loading it checks the rest."""
    try:
        with safe_open(checkpoint, framework="numpy") as file:
            return int((file.metadata() or {}).get("round", ""))
    except (SafetensorError, OSError, ValueError):
        return None
