"""Saves a checkpoint repeatedly, and is killed at each of the save's system calls: ``killed_saver.py FOLDER CASE``.

For each call of a save on the disk a child process is forked, with a folder of its own below FOLDER, named by the
call's number. The child kills itself (SIGKILL) before that call or, if it is a write, in the middle of it. The last
child completes: its folder is named ``whole``, and has the list of its calls in ``calls``, one per line.

CASE ``new``: rounds 1 and 2 exist with their indexes, and round 3 is saved in another thread. ``again``: round 2 is
saved again, with other weights. ``fetched``: a peer's round 7 is taken over.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from farandole.node.store.folder import CheckpointFolder, Saver, index_of
from farandole.protocol.checkpoints.blocks import BLOCK_BYTES
from farandole.protocol.trainer.trainer_messages import Saved
from farandole.training.base import durable
from farandole.training.base.parameters import Layout
from farandole.training.engine.blocks import content_of
from farandole.training.engine.checkpoint import Counters, save_checkpoint
from farandole.training.engine.snapshot import Snapshot

RUN_ID = b"r" * 32
# Several blocks, so that there are all kinds of writes: the header, up to a block's end, the rest of a vector.
LAYOUT = Layout({"first": (BLOCK_BYTES // 4, 1), "second": (1_000,)}, "fp32")
VECTORS = ("slow", "momentum")
# More calls than any save makes; if it is reached, there is a bug.
MAX_CALLS = 100


def snapshot(round_index: int, salt: int = 0) -> Snapshot:
    """Return a snapshot whose weights show their round."""
    vectors = {name: torch.full((LAYOUT.num_elements,), float(round_index + salt)) for name in VECTORS}
    counters = Counters(round_index, 10 * round_index, 100 * round_index)
    tensors = {
        f"{vector}/{name}": view for vector, flat in vectors.items() for name, view in LAYOUT.views(flat).items()
    }
    return Snapshot(counters, tensors, LAYOUT, RUN_ID, ())


def prepare(folder: CheckpointFolder) -> None:
    """Create the files that an earlier process left."""
    folder.path.mkdir(parents=True)
    for round_index in (1, 2):
        snapshot(round_index).save(folder.file(round_index))
        index_of(folder.file(round_index)).write_bytes(b"an index")
    fetched = snapshot(7, salt=1)
    save_checkpoint(folder.path.parent / "fetched", fetched.state, LAYOUT, RUN_ID, fetched.counters)


def play(folder: CheckpointFolder, case: str, report: Callable[[Saved], None]) -> Saver:
    """Save once, or take over a peer's checkpoint."""
    saver = Saver(folder, report)
    saver.note(folder.file(1), content_of(folder.file(1)), snapshot(1).counters)
    saver.note(folder.file(2), content_of(folder.file(2)), snapshot(2).counters)
    match case:
        case "new":
            saver.save_behind(snapshot(3))
        case "again":
            saver.save_behind(snapshot(2, salt=5))
        case "fetched":
            fetched = folder.path.parent / "fetched"
            saver.adopt(fetched, content_of(fetched), snapshot(7).counters)
    saver.wait()
    return saver


class Faults:
    """Counts calls, and kills the process at the n-th."""

    def __init__(self, fatal: int, notes: int) -> None:
        self.num_calls = 0
        self._fatal = fatal
        self._notes = notes

    def meet(self, words: str) -> bool:
        """Record a call before it is made; return True if the process must die in it."""
        os.write(self._notes, f"{words}\n".encode())
        self.num_calls += 1
        return self.num_calls - 1 == self._fatal

    def install(self) -> None:
        """Wrap every call that changes the disk or makes it durable, under each name that this project uses for it."""

        def wrapped(name: str, real: Any) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if self.meet(f"{name} {_name_of(args[0])}"):
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            return call

        for name in ("open", "fsync", "fdatasync", "replace", "rename", "unlink", "remove", "mkdir", "rmdir", "link"):
            setattr(os, name, wrapped(name, getattr(os, name)))
        meet = self.meet

        class Writer(durable.WholeFile):
            def write(self, data: Any) -> int:
                if meet(f"write {_name_of(self.fileno())}"):
                    super().write(memoryview(data)[: len(data) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().write(data)

        durable.WholeFile = Writer  # type: ignore[misc]  # this process is made to be killed in there


def _name_of(what: Any) -> str:
    return Path(os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else what).name


def main() -> None:
    """Fork children until one completes."""
    root, case = Path(sys.argv[1]), sys.argv[2]
    template = root / "template"
    prepare(CheckpointFolder(template / "checkpoints", 0))
    for fatal in range(MAX_CALLS):
        place = root / f"{fatal}"
        shutil.copytree(template, place)
        child = os.fork()
        if child == 0:
            notes = os.open(place / "calls", os.O_WRONLY | os.O_CREAT)
            Faults(fatal, notes).install()
            play(CheckpointFolder(place / "checkpoints", 0), case, lambda saved: None)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if status == 0:
            place.rename(root / "whole")
            return
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            sys.exit(f"call {fatal}: the child ended with {status}")
    sys.exit("a save without end")


if __name__ == "__main__":
    main()
