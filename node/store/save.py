"""Saves a trainer's checkpoints while its inner steps run: one at a time, each durable before an older one is removed.

A thread writes the snapshot, at a lower priority than training. A failure costs only that checkpoint: the older ones
stay, and the next save, which has a file of its own, may succeed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from farandole.protocol.trainer.trainer_messages import Saved
from farandole.training.base.durable import sync_folder

from ..base.system.tuning import SAVING_NICENESS, lower_thread_priority
from .folder import KEPT, CheckpointFolder, index_of

if TYPE_CHECKING:
    from farandole.training.engine.blocks import Content
    from farandole.training.engine.checkpoint import Counters
    from farandole.training.engine.snapshot import Checkpoint, Snapshot

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)


class Saver:
    """Writes one stage's checkpoints, and calls ``report``, from any thread, with the result of each save.

    ``num_kept``: the number of checkpoints that it keeps.
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
        self.wait()
        self._writing = threading.Thread(target=self._work, args=(source,), name="checkpoint", daemon=True)
        self._writing.start()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def _work(self, source: Checkpoint | Snapshot) -> None:
        lower_thread_priority(SAVING_NICENESS)
        saved = self._write(source)
        with contextlib.suppress(OSError):  # the mesh process is gone: the trainer notices that too, and ends
            self._report(saved)

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
            if error.errno in _NO_ROOM:
                remedy = f"it takes {size} in {folder}, where {_free(folder)} are free: make room"
            elif error.errno == errno.EFBIG:
                remedy = f"it takes {size}, and files may not be so large: raise the limit (ulimit -f)"
        kept = "the last good one is kept, and the" if self._newest is not None else "the"
        what = f"the checkpoint of round {source.counters.round} is not written: {reason}"
        return "; ".join(filter(None, [what, remedy, f"{kept} next save tries again"]))


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 1e6:,.1f} MB"
    except OSError as error:
        return f"an unknown number ({error.strerror})"
