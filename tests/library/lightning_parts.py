"""A Lightning module and a callback, in their own file because importing Lightning takes three seconds."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import Tensor, nn

from farandole.lightning import Callback as Callback


class Regression(lightning.LightningModule):
    """The sum of four numbers."""

    def __init__(self, num_optimizers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 1)
        self._num_optimizers = num_optimizers
        self.automatic_optimization = num_optimizers == 1

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss: Tensor = (self.layer(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        made = [torch.optim.SGD(self.parameters(), lr=1e-2) for _ in range(self._num_optimizers)]
        return made[0] if len(made) == 1 else made


class Rounds(lightning.Callback):
    """Records the round of farandole's callback after each batch, and can make training fail."""

    def __init__(self, ours: Any, fails_at: int = -1) -> None:
        self._ours = ours
        self._fails_at = fails_at
        self.rounds: list[int] = []
        self.status: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rounds.append(self._ours.noloco.round)
        self.status = self._ours.noloco.status()
        if len(self.rounds) == self._fails_at:
            raise RuntimeError("the loop fails")
