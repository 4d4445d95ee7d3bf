"""Lightning's Trainer trains with other members of a run, with only a callback added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import farandole
from farandole.node.own_loop.child_node import run_of_node


@pytest.fixture
def parts() -> Any:
    """Import Lightning only where its tests run: others are collected sooner."""
    from . import lightning_parts

    return lightning_parts


def trainer(parts: Any, folder: Path, *callbacks: Any) -> Any:
    settings = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return parts.lightning.Trainer(
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


def make_run(parts: Any, folder: Path) -> Path:
    return farandole.create_run(
        parts.Regression(), folder / "run", rounds={"inner_steps": 4, "round_seconds": 0, "exchange_seconds": 0.1}
    )


@pytest.mark.filterwarnings("default")
def test_a_trainer_takes_outer_steps_between_its_own(parts: Any, tmp_path: Path) -> None:
    run, module = make_run(parts, tmp_path), parts.Regression()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(100.0)  # the run's weights replace them
    ours = parts.Callback(run)
    seen = parts.Rounds(ours)
    trainer(parts, tmp_path, ours, seen).fit(module, loader())
    assert ours.noloco is None
    assert len(seen.rounds) == 12
    assert seen.rounds[-1] >= 1
    assert seen.status["loss"] is not None
    assert seen.status["loss"] < 100.0
    assert not run_of_node(run), "its node has left"


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("num_optimizers", "reason"), [(1, "the loop fails"), (2, "this module has 2")])
def test_the_node_leaves_when_training_fails(parts: Any, tmp_path: Path, num_optimizers: int, reason: str) -> None:
    """Several optimizers are refused."""
    run = make_run(parts, tmp_path)
    ours = parts.Callback(run)
    with pytest.raises((RuntimeError, ValueError), match=reason):
        trainer(parts, tmp_path, ours, parts.Rounds(ours, fails_at=2)).fit(parts.Regression(num_optimizers), loader())
    assert ours.noloco is None
    assert not run_of_node(run)
