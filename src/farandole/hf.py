"""Training with the other members of a run from `transformers.Trainer`.

    callback = farandole.hf.Callback("farandole1...")
    transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()

It needs transformers and accelerate: pip install 'farandole[hf]' accelerate
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from farandole.node.own_loop.noloco import OfTrainer

__all__ = ["Callback"]


class Callback(OfTrainer, TrainerCallback):
    """Joins a run when training begins, and leaves it when training ends; takes what `farandole.NoLoCo` takes.

    The Trainer's optimizer is followed, so gradient accumulation, clipping and schedules are the Trainer's. A Trainer
    that fails calls no callback: then the node leaves when the process ends, by SIGTERM too.
    """

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **others: Any,
    ) -> None:
        """Join the run and take over its weights."""
        assert model is not None, "a Trainer passes its model on"
        assert optimizer is not None, "a Trainer passes its optimizer on"
        self._begin(model, optimizer)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Leave the run."""
        self._end()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        """Add the round to what is logged, and report the loss."""
        if logs is not None and self.noloco is not None:
            if "loss" in logs:
                self.noloco.report(logs["loss"])
            logs["farandole_round"] = self.noloco.round
