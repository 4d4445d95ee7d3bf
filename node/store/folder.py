"""The folder with a node's own checkpoints.

    stage-0-round-41.safetensors            written by this node's trainer, or a peer's that it goes on from
    stage-0-round-41.safetensors.index      the hashes of its blocks, signed; made after it
    .stage-0-round-42.safetensors.*.tmp     being written, or left by who was killed meanwhile
    copy-1-<id>.blocks, …blocks.index       the beginning of another's, kept for others (`library`)
    stage-0-peers.msgpack                   what the screening rule remembers of peers

Stage 0 is also the whole model, where it is not cut. Nothing is ever written to a file that has its name: a new one
takes it when it is durable, and only then are older ones removed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open

from farandole.protocol.blocks import decode_signed_index, max_index_bytes
from farandole.protocol.errors import RemoteProtocolError
from farandole.training.durable import TEMPORARY_SUFFIX

# The newest, and the one before it for the day on which that cannot be read.
KEPT: Final = 2
_NAME: Final = re.compile(r"stage-(\d{1,5})-round-(\d{1,16})\.safetensors")
_INDEX_SUFFIX: Final = ".index"


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """One stage's checkpoints, in a folder that may have others' too, or not be there yet."""

    path: Path
    stage: int

    def file(self, round_index: int) -> Path:
        """Where the checkpoint of a round lies."""
        return self.path / f"stage-{self.stage}-round-{round_index}.safetensors"

    @property
    def histories(self) -> Path:
        """Where the screening rule's histories of peers lie, if it keeps any."""
        return self.path / f"stage-{self.stage}-peers.msgpack"

    def files(self) -> list[Path]:
        """All of this stage, the newest first."""
        found = ((_NAME.fullmatch(path.name), path) for path in self._entries())
        own = [(int(match[2]), path) for match, path in found if match and int(match[1]) == self.stage]
        return [path for _, path in sorted(own, reverse=True)]

    def keep(self, kept: Collection[Path]) -> None:
        """Remove all others of this stage. What cannot be removed stays, until the next time."""
        for path in self.files():
            if path not in kept:
                with contextlib.suppress(OSError):
                    index_of(path).unlink(missing_ok=True)
                    path.unlink(missing_ok=True)

    def trim(self, num_kept: int) -> None:
        """Remove all but so many of the newest of this stage."""
        self.keep(self.files()[:num_kept])

    def clean(self) -> None:
        """Remove what was left by trainers that were killed while they saved; for whoever knows that none saves now."""
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
    """Where the index of a checkpoint lies."""
    return checkpoint.with_name(checkpoint.name + _INDEX_SUFFIX)


def known_hashes(checkpoint: Path, run_id: bytes) -> bytes:
    """Those of its blocks, as its index has them; empty where there is none that can be read."""
    try:
        size = checkpoint.stat().st_size
        with index_of(checkpoint).open("rb") as file:
            raw = file.read(max_index_bytes(size) + 1)
        return decode_signed_index(raw, run_id, size)[1].hashes
    except (OSError, RemoteProtocolError):
        return b""


def saved_round(checkpoint: Path) -> int | None:
    """The round of a checkpoint, None if there is none that can be read; loading it judges the rest."""
    try:
        with safe_open(checkpoint, framework="numpy") as file:
            return int((file.metadata() or {}).get("round", ""))
    except (SafetensorError, OSError, ValueError):
        return None
