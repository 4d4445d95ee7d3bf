"""A trainer process's start and its saves: checkpoints, and the screening rule's histories of peers.

A thread writes a checkpoint while inner steps are taken (`farandole.node.store.folder`): they wait only for a copy of
its content.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from farandole.protocol.checkpoints.blocks import HASH_BYTES
from farandole.protocol.run.manifest import Manifest
from farandole.protocol.state.entries import Commitment
from farandole.protocol.trainer.trainer_messages import KEPT_STARTS, Prepare, Recorded, Report, Saved
from farandole.training.base.determinism import build, device_class
from farandole.training.base.errors import CheckpointError, UnfitWeightsError
from farandole.training.data.batches import CORPUS_BYTES
from farandole.training.engine.engine import Engine, fitness_of, why_unfit
from farandole.training.engine.learner import Learner
from farandole.training.screening.rule import MAX_BYTES, Histories

from ..base.system.tuning import SAVING_NICENESS, lower_thread_priority
from ..store.consolidated.tensors import write_file
from ..store.disk_space import plan_disk, used_bytes
from ..store.folder import CheckpointFolder, Saver, known_hashes


class Checkpoints:
    """The checkpoints of one engine, in this node's folder. ``report`` gets every `Saved`, from whatever thread."""

    def __init__(self, prepare: Prepare, engine: Engine, report: Callable[[Saved], None]) -> None:
        self._engine = engine
        self._report = report
        self._folder = CheckpointFolder(Path(prepare.settings.checkpoints), prepare.stage)
        text_bytes = used_bytes(Path(prepare.settings.tokens)) if prepare.settings.tokens else 0  # known by now
        plan = plan_disk(prepare.disk, prepare.checkpoint_bytes, copy_bytes=0, text_bytes=text_bytes)
        self._saver = Saver(self._folder, report, plan.num_kept)

    def begin(self, prepare: Prepare, manifest: Manifest) -> tuple[Saved | None, str]:
        """Resume from a checkpoint, or begin with the manifest's weights, or with the seed's.

        Returns the checkpoint, if there was one, and the faults of checkpoints that should have been loaded. A peer's
        checkpoint becomes this node's own only once it is proved to be fit. Raises `UnfitWeightsError` if it is not,
        and `CheckpointError` if nothing can be loaded.
        """
        fetched = Path(prepare.fetched)
        is_fetched = bool(prepare.fetched) and fetched.exists()
        resumed, problem = (self._adopt(fetched, prepare, manifest), "") if is_fetched else self._resume()
        if resumed is None and manifest.start is not None:
            self._start_from(Path(prepare.start), manifest.start.inner_steps, manifest.start.tokens)
        elif resumed is None:
            self._engine.begin_anew()
        with contextlib.suppress(OSError, ValueError), self._folder.histories.open("rb") as file:
            self._engine.round_end.partner.histories = Histories.decode(file.read(MAX_BYTES))
        return resumed, problem

    def _adopt(self, fetched: Path, prepare: Prepare, manifest: Manifest) -> Saved:
        """Continue from a peer's checkpoint, unless it is worse than this node's own weights."""
        if manifest.start is None:
            self._engine.begin_anew()
        elif Path(prepare.start).is_file():
            self._start_from(Path(prepare.start), manifest.start.inner_steps, manifest.start.tokens)
        initial, own = fitness_of(self._engine), None
        with contextlib.suppress(CheckpointError):  # a peer's weights may take the place of damaged ones
            own = None if self._resume()[0] is None else fitness_of(self._engine)
        try:
            content = self._engine.checkpoint.load(fetched)
            if reason := why_unfit(fitness_of(self._engine), initial, own):
                raise CheckpointError(reason)
        except CheckpointError as error:
            fetched.unlink()
            raise UnfitWeightsError(f"a peer's weights are unfit: {error}") from error
        return self._saver.adopt(fetched, content, self._engine.checkpoint.counters)

    def _resume(self) -> tuple[Saved | None, str]:
        problems: list[str] = []
        for path in self._folder.files():
            try:
                content = self._engine.checkpoint.load(path, known_hashes(path, self._engine.checkpoint.run_id))
            except CheckpointError as error:
                problems.append(str(error))
                continue
            return self._saver.note(path, content, self._engine.checkpoint.counters), "; ".join(problems)
        if problems:
            raise CheckpointError(
                f"no checkpoint in {self._folder.path} can be loaded ({'; '.join(problems)}). Restore them, or "
                "move them away to begin with the weights of others"
            )
        return None, ""

    def _start_from(self, path: Path, steps: int, tokens: int) -> None:
        try:
            self._engine.checkpoint.start_from(path, steps, tokens)
        except CheckpointError as error:
            with contextlib.suppress(OSError):
                path.unlink()  # its bytes were right once: they are right again after another download
            raise CheckpointError(
                f"the weights that this run starts from are unfit: {error}. They are removed here: join again to fetch "
                "them anew; if they are unfit again, the run was made with weights that nobody can start from"
            ) from error

    def save(self, *, is_last: bool) -> None:
        """Save a checkpoint; a full disk or a failed fsync causes a warning and does not stop training."""
        if encoded := self._engine.round_end.partner.histories.encode():
            with contextlib.suppress(OSError):  # the checkpoint's own save reports it
                self._folder.path.mkdir(parents=True, exist_ok=True)
                write_file(self._folder.histories, encoded)
        checkpoint, newest = self._engine.checkpoint, self._saver.newest
        if newest is not None and checkpoint.is_in(newest.round, newest.inner_steps):
            self._report(newest)
        elif is_last:
            self._saver.save(checkpoint)
        else:
            try:
                snapshot = checkpoint.snapshot()
            except MemoryError as error:
                self._saver.save(checkpoint, f"no memory for a snapshot ({error}): training waited for the save")
            else:
                self._saver.save_behind(snapshot)


# Records of rounds: their starts, kept for peers that replay them, and the hashes of their results.
#
# A thread writes a round's start while its inner steps are taken, and hashes its end while the exchange goes on; the
# inner steps wait for a copy within memory alone.

FOLDER: Final = "starts"


class Recorder:
    """Records one learner's rounds; ``report`` is called from its thread. Rounds that fail to write are left out."""

    def __init__(self, folder: Path, learner: Learner, report: Callable[[Report], None]) -> None:
        self._learner = learner
        self._report = report
        self._device = device_class(learner.device.torch_device)
        self._build = build()
        self._thread = ThreadPoolExecutor(1, "recorder", lower_thread_priority, (SAVING_NICENESS,))
        self._work: Future[None] | None = None
        self._begun_at = 0
        with contextlib.suppress(OSError):  # the files of an earlier process go
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.iterdir():
                path.unlink()
        self._saver = Saver(CheckpointFolder(folder, 0), lambda saved: None, KEPT_STARTS)

    def begin(self) -> None:
        """Record the start of a round, before its inner steps."""
        self.wait()
        with contextlib.suppress(MemoryError):
            snapshot = self._learner.checkpoint.snapshot("start")
            self._begun_at = self._learner.replica.optimizer.begun_at
            self._saver.save_behind(snapshot)

    def wait(self) -> None:
        """Wait until the threads are done with the memory that they read."""
        if self._work is not None:
            self._work.result()
            self._work = None
        self._saver.wait()

    def end(self, round_index: int, fragment: int, contribution: bytes) -> None:
        """Record a round's end, given its contribution; no inner step comes before `wait` or the next `begin`."""

        def tell() -> None:
            learner, start = self._learner, self._saver.newest
            if start is None or start.round != round_index or learner.totals.steps == start.inner_steps:
                return
            commitment = Commitment(
                round=round_index,
                start=bytes(HASH_BYTES),
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
            )
            with contextlib.suppress(OSError):  # the mesh process is gone: the trainer sees it too, and ends
                self._report(Recorded(commitment, start))

        self._work = self._thread.submit(tell)
