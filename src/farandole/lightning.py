"""Training with the other members of a run from Lightning's `Trainer`.

    callback = farandole.lightning.Callback("farandole1...")
    lightning.Trainer(callbacks=[callback]).fit(module, loader)

It needs Lightning: pip install 'farandole[lightning]'
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT

from farandole.node.own_loop.noloco import OfTrainer

__all__ = ["Callback"]


class Callback(OfTrainer, lightning.Callback):
    """Joins a run when training begins, and leaves it when training ends; takes what `farandole.NoLoCo` takes.

    The module's optimizer is followed, so gradient accumulation, clipping and schedules are the Trainer's. With several
    optimizers there is no such step to follow, which raises `ValueError`.
    """

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Join the run and take over its weights."""
        if len(trainer.optimizers) != 1:
            raise ValueError(f"a run's steps are those of one optimizer, and this module has {len(trainer.optimizers)}")
        self._begin(pl_module, trainer.optimizers[0])

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Add the round to what is logged; report the loss as often as the Trainer logs: it waits for the device."""
        if self.noloco is None:
            return
        loss = outputs.get("loss") if hasattr(outputs, "get") else outputs
        if isinstance(loss, torch.Tensor) and batch_idx % trainer.log_every_n_steps == 0:
            self.noloco.report(loss.item())
        pl_module.log("farandole_round", float(self.noloco.round))

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Leave the run."""
        self._end()

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        """Leave: training has failed, or was interrupted."""
        self._end()
