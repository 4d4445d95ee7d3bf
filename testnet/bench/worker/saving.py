"""A trainer that saves in one way."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from farandole.node.base.system.tuning import TRAINING_NICENESS
from farandole.node.store.folder import CheckpointFolder, Saver
from farandole.protocol.run.manifest import manifest_from_dict
from farandole.protocol.trainer.trainer_messages import Saved, TrainerSettings
from farandole.training.base.durable import sync_folder
from farandole.training.engine.learner import Learner, build_learner

from .server import Server, UsageMeter

RUN_ID: Final = bytes(32)


class SavingTrainer:
    """Trains, and saves at the beginning of each round; `begin` must be called once, first."""

    _learner: Learner
    _meter: UsageMeter
    _save: Callable[[], None]

    def __init__(self, server: Server) -> None:
        os.nice(TRAINING_NICENESS)  # as trainers are
        self._reports: list[tuple[float, Saved]] = []

    def begin(self, manifest: dict[str, Any], way: str, device: str, threads: int, folder: str) -> dict[str, Any]:
        """Set up the trainer; ``way`` is none, behind, or torch, which is `torch.save` and fsync."""
        torch.set_num_threads(threads)
        checked = manifest_from_dict(manifest)
        self._learner = build_learner(checked, run_id=RUN_ID, author=bytes(32), settings=TrainerSettings(device=device))
        self._folder = CheckpointFolder(Path(folder), 0)
        self._folder.path.mkdir(parents=True)
        self._saver = Saver(self._folder, lambda saved: self._reports.append((time.monotonic(), saved)))
        self._save = {
            "none": lambda: None,
            "behind": lambda: self._saver.save_behind(self._learner.checkpoint.snapshot()),
            "torch": self._torch_save,
        }[way]
        self._take_step()  # one-time allocations happen here
        self._meter = UsageMeter([])
        return {"num_parameters": self._learner.checkpoint.layout.num_elements}

    def play(self, steps: int) -> dict[str, Any]:
        """Run a round (a save, inner steps, an outer step); return its duration and the save's, until durable."""
        self._reports.clear()
        with self._meter.running() as figures:
            began_at = time.monotonic()
            self._save()
            held = time.monotonic() - began_at
            for _ in range(steps):
                self._take_step()
            self._learner.round_end.apply(None)
            self._synchronize()
            seconds = time.monotonic() - began_at
            self._saver.wait()
        for durable_at, saved in self._reports:
            if saved.problem:
                raise OSError(saved.problem)
            figures |= {"write_seconds": durable_at - began_at, "size": saved.size}
        return {**figures, "seconds": seconds, "held_seconds": held}

    def _take_step(self) -> None:
        self._learner.learn()
        self._synchronize()

    def _synchronize(self) -> None:
        """Wait for the GPU's queue, so that queued work is in the time."""
        if self._learner.device.torch_device.type == "cuda":
            torch.cuda.synchronize()

    def _torch_save(self) -> None:
        temporary, path = self._folder.path / "torch.tmp", self._folder.path / "torch"
        with temporary.open("wb") as file:
            torch.save(self._learner.checkpoint.vectors(), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(self._folder.path)
        counters = self._learner.checkpoint.counters
        saved = Saved(counters.round, counters.steps, counters.tokens, str(path), path.stat().st_size)
        self._reports.append((time.monotonic(), saved))
