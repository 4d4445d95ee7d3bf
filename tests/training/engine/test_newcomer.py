"""A newcomer tells weights that have learnt from those that only look like a checkpoint."""

from __future__ import annotations

import math

import pytest
import torch

from farandole.training.engine.engine import MAX_GROWTH, Fitness, fitness_of, why_unfit
from farandole.training.engine.learner import Learner

from ..conftest import MakeReplica


@pytest.fixture
def learnt(make_replica: MakeReplica) -> Learner:
    replica = make_replica()
    for _ in range(10):
        replica.learn()
    replica.round_end.apply(None)
    return replica


def with_weights(replica: Learner, weights: torch.Tensor) -> Fitness:
    """The same replica with other weights, as if they had come in a checkpoint."""
    replica.round_end.weights.flat.copy_(weights)
    offset = 0
    for name, tensor in replica.checkpoint.tensors().items():
        if name.startswith("slow/"):
            tensor.copy_(weights[offset : offset + tensor.numel()].view_as(tensor))
            offset += tensor.numel()
    return fitness_of(replica)


def test_what_has_learnt_is_fit_and_noise_and_blown_up_weights_are_not(
    make_replica: MakeReplica, learnt: Learner
) -> None:
    initial, trained = fitness_of(make_replica()), fitness_of(learnt)
    assert why_unfit(trained, initial, None) == ""
    assert why_unfit(initial, initial, None) == "", "a fresh start is no worse than itself"
    weights, victim = learnt.round_end.fast_weights(), make_replica()
    noise = torch.randn(len(weights), generator=torch.Generator().manual_seed(1))
    for poison in (noise, 30.0 * weights, weights + noise):
        with torch.no_grad():
            reason = why_unfit(with_weights(victim, poison), initial, None)
        assert "their loss on held-out text is" in reason
        assert "initial weights have" in reason


def test_a_node_that_was_away_takes_none_that_are_much_worse_than_its_own(
    make_replica: MakeReplica, learnt: Learner
) -> None:
    initial, own = Fitness(5.0, 10.0), Fitness(2.0, 10.0)
    assert why_unfit(Fitness(2.4, 10.0), initial, own) == ""
    assert "this node's own have 2.000" in why_unfit(Fitness(4.0, 10.0), initial, own)
    assert why_unfit(Fitness(4.0, 10.0), initial, Fitness(math.nan, 10.0)) == "", "its own diverged"


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_unfit_whatever_is_known(loss: float) -> None:
    for known in (5.0, None, math.nan):
        assert why_unfit(Fitness(loss, 1.0), Fitness(known, 1.0), None)


def test_of_a_stage_the_magnitude_alone_is_judged() -> None:
    initial = Fitness(None, 1.0)
    assert why_unfit(Fitness(None, MAX_GROWTH), initial, None) == ""
    assert "norm" in why_unfit(Fitness(None, 1.01 * MAX_GROWTH), initial, None)
    assert "norm" in why_unfit(Fitness(None, math.nan), initial, None)
