"""A replica begins with another run's weights, each stage with its own part of them, and nothing unfit."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from farandole.protocol.run.manifest import InnerConfig, ModelConfig
from farandole.training.base.errors import CheckpointError
from farandole.training.data.dataset import Text
from farandole.training.engine.learner import Learner
from farandole.training.inner.optimizer import learning_rate

from ..conftest import MakeReplica, copy_without, rate_of, rewrite, train
from .test_checkpoint import run
from .test_stage_worker import workers_of


@pytest.fixture
def start(make_replica: MakeReplica, tmp_path: Path) -> tuple[Learner, Path]:
    """A replica that has learnt, and a file with its weights as another run's consolidated checkpoint has them."""
    learnt = run(make_replica())
    learnt.checkpoint.save(tmp_path / "whole")
    return learnt, copy_without(tmp_path / "whole", ("mean", "square"), tmp_path / "start")


def test_weights_momentum_and_schedule_go_on(
    start: tuple[Learner, Path], make_replica: MakeReplica, inner: InnerConfig
) -> None:
    learnt, path = start
    begun = make_replica(run_id=b"n" * 32, seed=1, codec="int4")
    begun.checkpoint.start_from(path, learnt.totals.steps, learnt.totals.tokens)
    assert torch.equal(begun.round_end.slow_weights(), learnt.round_end.slow_weights())
    assert torch.equal(begun.round_end.fast_weights(), learnt.round_end.slow_weights())
    assert torch.equal(begun.checkpoint.vectors()["momentum"], learnt.checkpoint.vectors()["momentum"])
    assert not begun.checkpoint.vectors()["square"].any()
    assert (begun.totals.round, begun.totals.steps, begun.totals.tokens) == (0, 8, learnt.totals.tokens)
    assert learning_rate(0, inner) != rate_of(learnt) > rate_of(begun) > 0
    for _ in range(50):
        begun.totals.steps += 1
    assert rate_of(begun) == learning_rate(58, inner)
    begun.totals.steps = 8
    assert begun.evaluate() == pytest.approx(learnt.evaluate(), rel=1e-6)
    before = begun.evaluate()
    train(begun, 8)
    begun.round_end.apply(None)
    assert begun.evaluate() < before


def test_each_stage_takes_its_own(
    start: tuple[Learner, Path], model: ModelConfig, inner: InnerConfig, text: Text
) -> None:
    learnt, path = start
    weights = learnt.checkpoint.layout.views(learnt.round_end.slow_weights())
    names = []
    for worker in workers_of(replace(model, num_layers=2), inner, text, 3):
        worker.checkpoint.start_from(path, 8, 0)
        for name, tensor in worker.checkpoint.layout.views(worker.round_end.slow_weights()).items():
            assert torch.equal(tensor, weights[name])
            names.append(name)
    assert sorted(names) == sorted(weights)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda tensors: tensors.pop("slow/norm.weight"), "has no slow/norm.weight"),
        (lambda tensors: tensors.pop("momentum/norm.weight"), "has no momentum/norm.weight"),
        (lambda tensors: tensors.update({"slow/norm.weight": torch.ones(3)}), "not fp32"),
        (lambda tensors: tensors["slow/norm.weight"].fill_(float("nan")), "not finite"),
        (lambda tensors: tensors.clear(), "has no slow/"),
    ],
)
def test_what_does_not_fit_changes_nothing(
    start: tuple[Learner, Path],
    make_replica: MakeReplica,
    spoil: Callable[[dict[str, torch.Tensor]], object],
    says: str,
) -> None:
    path = start[1]
    rewrite(path, lambda tensors, _: spoil(tensors), path)
    begun = make_replica(seed=1)
    before = begun.round_end.slow_weights()
    with pytest.raises(CheckpointError, match=says):
        begun.checkpoint.start_from(path, 8, 0)
    path.write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="no safetensors file"):
        begun.checkpoint.start_from(path, 8, 0)
    with pytest.raises(CheckpointError, match="no safetensors file"):
        begun.checkpoint.start_from(path.with_name("gone"), 8, 0)
    assert torch.equal(begun.round_end.slow_weights(), before)
    assert begun.totals.steps == 0
