"""The folder with a node's own checkpoints, and how a trainer saves them.

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
import errno
import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from safetensors import SafetensorError, safe_open

from farandole.protocol.checkpoints.blocks import decode_signed_index, max_index_bytes
from farandole.protocol.trainer.trainer_messages import Saved
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.training.base.durable import TEMPORARY_SUFFIX, sync_folder

from ..base.system.tuning import SAVING_NICENESS, lower_thread_priority

if TYPE_CHECKING:
    from farandole.training.engine.blocks import Content
    from farandole.training.engine.checkpoint import Counters
    from farandole.training.engine.snapshot import Checkpoint, Snapshot

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


class Saver:
    """Writes one stage's checkpoints, one at a time, and calls ``report``, from any thread, with each save's result.

    A thread writes the snapshot while inner steps run, at a lower priority than training. Each is durable before an
    older one is removed. A failure costs only that checkpoint: the older ones stay, and the next save, which has a file
    of its own, may succeed. ``num_kept``: the number of checkpoints that it keeps.
    """

    def __init__(self, folder: CheckpointFolder, report: Callable[[Saved], None], num_kept: int = KEPT) -> None:
        self._folder = folder
        self._report = report
        self._kept: deque[Path] = deque(maxlen=num_kept)
        self._newest: Saved | None = None
        self._writing: threading.Thread | None = None

    @property
    def newest(self) -> Saved | None:
        """Return the newest checkpoint that is durable. Waits for one that is being written."""
        self.wait()
        return self._newest

    def adopt(self, fetched: Path, content: Content, counters: Counters) -> Saved:
        """Move a peer's file, which is valid and durable, to its place among this node's own."""
        path = self._make_way(counters)
        fetched.replace(path)
        sync_folder(path.parent)
        return self.note(path, content, counters)

    def note(self, path: Path, content: Content, counters: Counters) -> Saved:
        """Note a valid checkpoint as the newest."""
        if path not in self._kept:
            self._kept.append(path)
        self._newest = Saved(counters.round, counters.steps, counters.tokens, str(path), content.size, content.hashes)
        return self._newest

    def save(self, source: Checkpoint | Snapshot, note: str = "") -> None:
        """Save now, in this thread, and report it with ``note``."""
        self.wait()
        self._report(msgspec.structs.replace(self._write(source), note=note))

    def save_behind(self, source: Checkpoint | Snapshot) -> None:
        """Save in a separate thread; ``source`` must not change until the report."""

        def work() -> None:
            lower_thread_priority(SAVING_NICENESS)
            saved = self._write(source)
            with contextlib.suppress(OSError):  # the mesh process is gone: the trainer notices that too, and ends
                self._report(saved)

        self.wait()
        self._writing = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._writing.start()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def _write(self, source: Checkpoint | Snapshot) -> Saved:
        counters, began_at = source.counters, time.monotonic()
        try:
            path = self._make_way(counters)
            saved = self.note(path, source.save(path), counters)
            saved = self._newest = msgspec.structs.replace(saved, seconds=time.monotonic() - began_at)
        except (OSError, RuntimeError, MemoryError) as error:  # RuntimeError: a device from which nothing can be copied
            return Saved(counters.round, counters.steps, counters.tokens, problem=self._explain(error, source))
        self._folder.keep(self._kept)
        return saved

    def _make_way(self, counters: Counters) -> Path:
        """Return the file's path; the index of an earlier file with this name is removed first."""
        path = self._folder.file(counters.round)
        if not path.parent.exists():
            path.parent.mkdir()
            sync_folder(path.parent.parent)
        index_of(path).unlink(missing_ok=True)
        return path

    def _explain(self, error: Exception, source: Checkpoint | Snapshot) -> str:
        """Explain what is wrong, what is needed, and what to do."""
        folder, size = self._folder.path, f"{source.num_bytes / 1e6:,.1f} MB"
        reason, remedy = str(error) or repr(error), ""
        if isinstance(error, OSError):
            reason, remedy = os.strerror(error.errno or 0), f"look after the disk of {folder}"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                remedy = shortage(folder, source.num_bytes) or f"it takes {size} in {folder}: make room"
            elif error.errno == errno.EFBIG:
                remedy = f"it takes {size}, and files may not be so large: raise the limit (ulimit -f)"
        kept = "the last good one is kept, and the" if self._newest is not None else "the"
        what = f"the checkpoint of round {source.counters.round} is not written: {reason}"
        return "; ".join(filter(None, [what, remedy, f"{kept} next save tries again"]))


def shortage(folder: Path, num_bytes: int) -> str:
    """Return how much to free in a folder for ``num_bytes`` more; empty if they fit. Blocks for a moment.

    A folder of which the system does not say it is taken to have the room.
    """
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return ""
    if free >= num_bytes:
        return ""
    missing = f"{max(num_bytes - free, 1e5) / 1e6:,.1f} MB"
    return f"free {missing} in {folder}: {num_bytes / 1e6:,.1f} MB are needed, and {free / 1e6:,.1f} MB are free"
