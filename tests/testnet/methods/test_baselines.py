from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from msgspec.structs import asdict

from farandole.protocol.run.manifest import InnerConfig, ModelConfig
from farandole.protocol.run.rules import Codec, Momentum, NoLoCoConfig, OuterConfig
from farandole.testnet.methods.baselines import Ensemble, Method, Trial, methods, rule_for, train
from farandole.testnet.methods.diloco import DiLoCoConfig
from farandole.training.data.dataset import Sampler, Text
from farandole.training.engine.learner import Learner
from farandole.training.model.model import language_loss
from farandole.training.outer.rule import Meeting, OwnVectors
from farandole.training.screening.rule import Encounter

from ...training.conftest import RUN_ID, MakeReplica

PLAIN = InnerConfig(learning_rate=3e-3, warmup_steps=3, total_steps=30, batch_size=4)


@pytest.fixture
def samplers(text: Text) -> list[Sampler]:
    return [Sampler(text, run_id=RUN_ID, author=bytes([n]) * 32, batch_size=4, context=16) for n in range(4)]


def trained(
    method: Method,
    model: ModelConfig,
    samplers: list[Sampler],
    steps: int,
    progress: Callable[[int], None] = lambda step: None,
) -> Ensemble:
    trial = Trial(1, method.rate, samplers)
    ensemble = Ensemble(method, model, PLAIN, trial)
    train(method, ensemble, [trial], steps, progress)
    return ensemble


def rows(replicas: list[Learner]) -> torch.Tensor:
    return torch.stack([replica.round_end.fast_weights() for replica in replicas])


@pytest.mark.parametrize(("momentum", "codec"), [("heavy_ball", "fp32"), ("nesterov", "int8"), ("nesterov", "int4")])
@pytest.mark.parametrize("fragments", [1, 2])
def test_an_ensemble_does_what_replicas_do(
    make_replica: MakeReplica,
    model: ModelConfig,
    samplers: list[Sampler],
    momentum: Momentum,
    codec: Codec,
    fragments: int,
) -> None:
    outer = NoLoCoConfig(momentum=momentum, codec=codec, fragments=fragments)
    replicas = [make_replica(bytes([n]) * 32, inner_settings=PLAIN, **asdict(outer)) for n in range(4)]
    ensemble = Ensemble(Method("pairs", "pairs", outer=outer), model, PLAIN, Trial(7, 1.0, samplers))

    for round_number, pairs in enumerate(([(0, 1), (2, 3)], [(2, 0), (1, 3)])):
        for step in range(3 * round_number, 3 * round_number + 3):
            ensemble.inner_step(np.stack([sampler.batch(step) for sampler in samplers]))
            for replica in replicas:
                replica.learn()
        ensemble.contribute(round_number % fragments)
        ensemble.outer_step(pairs)
        for first, second in pairs:
            buffers = [bytearray(replicas[row].round_end.contribution_bytes) for row in (first, second)]
            for row, buffer in zip((first, second), buffers, strict=True):
                size, _ = replicas[row].round_end.contribute(buffer, round_number % fragments)
                del buffer[size:]
            replicas[first].round_end.apply(buffers[1], Encounter(b"", 1, 1), own_first=True)
            replicas[second].round_end.apply(buffers[0], Encounter(b"", 1, 1), own_first=False)

        torch.testing.assert_close(ensemble.theta, rows(replicas), rtol=1e-5, atol=1e-6)


def test_synchronous_training_is_one_model_on_all_batches(model: ModelConfig, samplers: list[Sampler]) -> None:
    together = trained(Method("together", "gradients"), model, samplers, 5)
    batches = [np.concatenate([sampler.batch(step) for sampler in samplers])[None] for step in range(5)]
    alone = Ensemble(Method("alone", "none"), model, PLAIN, Trial(1, 1.0, samplers[:1]))

    for batch in batches:
        alone.inner_step(batch)

    assert torch.equal(together.theta, alone.theta)


@pytest.mark.parametrize("outer", [NoLoCoConfig(momentum="nesterov"), DiLoCoConfig()])
def test_diloco_keeps_everybody_alike_and_steps_by_the_mean(
    model: ModelConfig, samplers: list[Sampler], outer: OuterConfig
) -> None:
    apart = trained(Method("apart", "none"), model, samplers, 3)
    diloco = trained(Method("DiLoCo", "all", 3, outer), model, samplers, 3)
    start = Ensemble(Method("alone", "none"), model, PLAIN, Trial(1, 1.0, samplers[:1])).phi

    expected = OwnVectors(start.clone(), start, {"momentum": torch.zeros_like(start)})
    rule = rule_for(outer)
    contributions = [rule.contribution(replace(expected, fast=theta[None])) for theta in apart.theta]
    rule.step(expected, Meeting(contributions, [0.25] * 4))

    assert diloco.spreads()[0] < 1e-7
    torch.testing.assert_close(diloco.theta[:1], expected.slow, rtol=1e-5, atol=1e-6)
    assert apart.spreads()[0] > 1e-3


def test_noloco_pulls_replicas_together(model: ModelConfig, samplers: list[Sampler]) -> None:
    apart = trained(Method("apart", "none"), model, samplers, 20)
    noloco = trained(Method("NoLoCo", "pairs", 5), model, samplers, 20)

    assert 0 < noloco.spreads()[0] < 0.8 * apart.spreads()[0]


def test_a_late_outer_step_keeps_what_was_learnt_meanwhile(model: ModelConfig, samplers: list[Sampler]) -> None:
    """By hand: a contribution after the third step, its outer step after the fifth, and the last one at the end."""
    outer = NoLoCoConfig(momentum="nesterov")
    late = trained(Method("late", "all", 3, outer, late=2), model, samplers, 6)

    by_hand = Ensemble(Method("by hand", "all", outer=outer), model, PLAIN, Trial(1, 1.0, samplers))
    snapshot = torch.empty(0)
    for step in range(6):
        by_hand.inner_step(np.stack([sampler.batch(step) for sampler in samplers]))
        if step == 2:
            snapshot = by_hand.theta.clone()
            by_hand.contribute()
        if step == 4:
            progress = by_hand.theta - snapshot
            by_hand.outer_step([range(4)], is_late=True)
            torch.testing.assert_close(by_hand.theta, by_hand.phi + progress)
    by_hand.contribute()
    by_hand.outer_step([range(4)])

    torch.testing.assert_close(late.theta, by_hand.theta)


@pytest.mark.parametrize("late", [0, 2])
def test_the_last_inner_step_ends_a_round(model: ModelConfig, samplers: list[Sampler], late: int) -> None:
    """Otherwise methods with long rounds would be evaluated further away from an outer step than others."""
    cut_short = trained(Method("DiLoCo", "all", 3, DiLoCoConfig(), late), model, samplers, 5)

    assert torch.equal(cut_short.theta, cut_short.phi)
    assert cut_short.spreads()[0] < 1e-7


def test_a_merge_is_the_mean(model: ModelConfig, samplers: list[Sampler]) -> None:
    ensemble = trained(Method("apart", "none"), model, samplers, 3)
    mean = ensemble.theta.mean(0)

    ensemble.merge()

    assert all(torch.equal(row, mean) for row in ensemble.theta)
    batch = samplers[0].held_out_batch(0)
    alone = float(language_loss(ensemble.modules[3], torch.from_numpy(batch)).detach())
    assert ensemble.losses([batch]) == [pytest.approx(alone)]


def test_every_method_trains_an_odd_number_too(model: ModelConfig, samplers: list[Sampler]) -> None:
    seen: list[int] = []
    for method in methods(interval=2):
        seen.clear()

        ensemble = trained(method, model, samplers[:3], 4, seen.append)

        assert seen == [1, 2, 3, 4]
        assert bool(ensemble.theta.isfinite().all())
