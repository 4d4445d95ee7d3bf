"""Lightning's Trainer trains with other members of a run, with only a callback added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning")

import lightning

import farandole
import farandole.lightning
from farandole.node.own_loop.child_node import run_of_node


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


def trainer(folder: Path, *callbacks: Any) -> Any:
    settings = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return lightning.Trainer(
        max_steps=12,
        log_every_n_steps=1,
        default_root_dir=folder,
        callbacks=list(callbacks),
        enable_model_summary=False,
        **settings,
    )


def loader() -> Any:
    numbers = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(numbers), batch_size=2)


def make_run(folder: Path) -> Path:
    return farandole.create_run(
        Regression(), folder / "run", rounds={"inner_steps": 4, "round_seconds": 0, "exchange_seconds": 0.1}
    )


@pytest.mark.filterwarnings("default")
def test_a_trainer_takes_outer_steps_between_its_own(tmp_path: Path) -> None:
    run, module = make_run(tmp_path), Regression()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(100.0)  # the run's weights replace them
    ours = farandole.lightning.Callback(run)
    seen = Rounds(ours)
    trainer(tmp_path, ours, seen).fit(module, loader())
    assert ours.noloco is None
    assert len(seen.rounds) == 12
    assert seen.rounds[-1] >= 1
    assert seen.status["loss"] is not None
    assert seen.status["loss"] < 100.0
    assert not run_of_node(run), "its node has left"


@pytest.mark.filterwarnings("default")
def test_the_node_leaves_when_training_fails(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    ours = farandole.lightning.Callback(run)
    with pytest.raises(RuntimeError, match="the loop fails"):
        trainer(tmp_path, ours, Rounds(ours, fails_at=2)).fit(Regression(), loader())
    assert ours.noloco is None
    assert not run_of_node(run)


@pytest.mark.filterwarnings("default")
def test_several_optimizers_are_refused(tmp_path: Path) -> None:
    ours = farandole.lightning.Callback(make_run(tmp_path))
    with pytest.raises(ValueError, match="this module has 2"):
        trainer(tmp_path, ours).fit(Regression(2), loader())
