"""Records of rounds: their starts, kept for peers that replay them, and the hashes of their results.

A thread writes a round's start while its inner steps are taken, and hashes its end while the exchange goes on; the
inner steps wait for a copy within memory alone.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from farandole.protocol.run.manifest import Manifest
from farandole.protocol.trainer.trainer_messages import KEPT_STARTS, Prepare, Recorded, Report, Saved
from farandole.training.base.determinism import build, device_class
from farandole.training.data.batches import CORPUS_BYTES
from farandole.training.engine.engine import Engine
from farandole.training.engine.learner import Learner
from farandole.training.engine.snapshot import Snapshot

from ..base.system.tuning import SAVING_NICENESS, lower_thread_priority

FOLDER: Final = "starts"


class Recorder:
    """Records one learner's rounds; ``report`` is called from its thread. Rounds that fail to write are left out."""

    def __init__(self, folder: Path, learner: Learner, report: Callable[[Report], None]) -> None:
        self._folder = folder
        self._learner = learner
        self._report = report
        self._device = device_class(learner.device.torch_device)
        self._build = build()
        self._kept: deque[Path] = deque()
        self._thread = ThreadPoolExecutor(1, "recorder", lower_thread_priority, (SAVING_NICENESS,))
        self._work: Future[None] | None = None
        self._start: Saved | None = None
        self._begun_at = 0
        self._clear()

    def _clear(self) -> None:
        """Remove the files of an earlier process."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            for path in self._folder.iterdir():
                path.unlink()

    def begin(self) -> None:
        """Record the start of a round, before its inner steps."""
        self.wait()
        try:
            snapshot = self._learner.checkpoint.start()
        except MemoryError:
            self._start = None
            return
        self._begun_at = self._learner.replica.optimizer.begun_at
        self._work = self._thread.submit(self._write, snapshot)

    def wait(self) -> None:
        """Wait until the thread is done with the memory that it reads."""
        if self._work is not None:
            self._work.result()
            self._work = None

    def _write(self, snapshot: Snapshot) -> None:
        counters, self._start = snapshot.counters, None
        path = self._folder / f"round-{counters.round}.safetensors"
        with contextlib.suppress(OSError):
            content = snapshot.save(path)
            self._start = Saved(
                counters.round, counters.steps, counters.tokens, str(path), content.size, content.hashes
            )
        if path not in self._kept:
            self._kept.append(path)
        while len(self._kept) > KEPT_STARTS:
            with contextlib.suppress(OSError):
                self._kept.popleft().unlink(missing_ok=True)

    def end(self, round_index: int, fragment: int, contribution: bytes) -> None:
        """Record a round's end, given its contribution; no inner step comes before `wait` or the next `begin`."""
        self._work = self._thread.submit(self._tell, round_index, fragment, contribution)

    def _tell(self, round_index: int, fragment: int, contribution: bytes) -> None:
        learner, start = self._learner, self._start
        if start is None or start.round != round_index or learner.totals.steps == start.inner_steps:
            return
        recorded = Recorded(
            round=round_index,
            first_step=start.inner_steps,
            steps=learner.totals.steps - start.inner_steps,
            begun_at=self._begun_at,
            microbatch=learner.microbatch_size,
            fragment=fragment,
            end=learner.replica.optimizer.digest(),
            contribution=contribution,
            corpus=learner.sampler.corpus or bytes(CORPUS_BYTES),
            build=self._build,
            device=self._device,
            start=start,
        )
        with contextlib.suppress(OSError):  # the mesh process is gone: the trainer sees it too, and ends
            self._report(recorded)


def recorder_of(
    prepare: Prepare, manifest: Manifest, engine: Engine, report: Callable[[Report], None]
) -> Recorder | None:
    """Make a recorder if the run has audits and the engine has rounds; else return None."""
    if not manifest.audits or not isinstance(engine, Learner):
        return None
    return Recorder(Path(prepare.settings.checkpoints) / FOLDER, engine, report)
