import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from msgspec import structs

from farandole.protocol.run.manifest import InnerConfig, InnerName, ModelConfig
from farandole.protocol.run.rules import NoLoCoConfig, OuterConfig, PlainConfig
from farandole.testnet.methods.adapters import METHODS, MODEL, RANK, AdapterStack
from farandole.testnet.methods.baselines import Group, Method, Trial, methods, rule_for
from farandole.testnet.methods.co2 import CO2Config
from farandole.testnet.methods.diloco import DiLoCoConfig
from farandole.testnet.methods.gasloc import GASLoCConfig
from farandole.testnet.methods.stacked import Stack, groups_of, train
from farandole.training.base.errors import TrainingError
from farandole.training.base.parameters import layout_of
from farandole.training.data.dataset import Sampler, Text
from farandole.training.engine.learner import Learner
from farandole.training.inner.optimizer import matrices_of
from farandole.training.model.model import build_model, language_loss
from farandole.training.outer.rule import Meeting, OwnVectors
from farandole.training.screening.rule import Encounter

from ...training.conftest import RUN_ID, MakeReplica

CPU = torch.device("cpu")
FRAGMENTS = NoLoCoConfig(alpha=0.0, beta=1.0, gamma=1.0, codec="int8", fragments=2)
INNER = InnerConfig(learning_rate=3e-3, warmup_steps=3, total_steps=30, batch_size=4, weight_decay=0.1, clip=0.5)


@pytest.fixture
def samplers(text: Text) -> list[Sampler]:
    return [Sampler(text, key=(RUN_ID, bytes([n]) * 32), batch_size=4, context=16) for n in range(4)]


def trained(method: Method, model: ModelConfig, trials: list[Trial], steps: int) -> Stack:
    stack = Stack(method, [build_model(model, trial.seed) for trial in trials], INNER, trials, CPU)
    train(method, stack, trials, steps)
    return stack


def rows(replicas: list[Learner]) -> torch.Tensor:
    return torch.stack([replica.round_end.fast_weights() for replica in replicas])


def weights(stack: Stack, like: torch.Tensor) -> torch.Tensor:
    """Return the rows of a stack without what pads them, which stays zero."""
    assert not bool(stack.theta[:, like.size(-1) :].any())
    return stack.theta[:, : like.size(-1)]


@pytest.mark.parametrize(
    ("outer", "optimizer"),
    [
        (NoLoCoConfig(), "adamw"),
        (NoLoCoConfig(momentum="nesterov"), "muon"),
        (NoLoCoConfig(momentum="nesterov", codec="int8"), "adamw"),
        (NoLoCoConfig(alpha=0.0, beta=1.0, gamma=1.0, codec="int4"), "adamw"),
        (NoLoCoConfig(codec="bf16"), "adamw"),
    ],
    ids=str,
)
@pytest.mark.parametrize("fragments", [1, 2])
def test_a_stack_does_what_replicas_do(
    make_replica: MakeReplica,
    model: ModelConfig,
    samplers: list[Sampler],
    outer: NoLoCoConfig,
    optimizer: InnerName,
    fragments: int,
) -> None:
    """Weights that differ by fp32's rounding may be sent as neighbouring numbers, or not at all, but only few are."""
    outer, inner = structs.replace(outer, fragments=fragments), structs.replace(INNER, optimizer=optimizer)
    replicas = [make_replica(bytes([n]) * 32, inner_settings=inner, rule=outer) for n in range(4)]
    method = Method("pairs", "pairs", outer=outer, optimizer=optimizer)
    stack = Stack(method, [build_model(model, 7)], INNER, [Trial(7, 1.0, samplers)], CPU)
    for round_number, pairs in enumerate(([(0, 1), (2, 3)], [(2, 0), (1, 3)])):
        for step in range(3 * round_number, 3 * round_number + 3):
            stack.inner_step(np.stack([sampler.batch(step) for sampler in samplers]))
            for replica in replicas:
                replica.learn()
        stack.contribute(round_number % fragments)
        stack.outer_step(pairs)
        for first, second in pairs:
            buffers = [bytearray(replicas[row].round_end.contribution_bytes) for row in (first, second)]
            for row, buffer in zip((first, second), buffers, strict=True):
                size, _ = replicas[row].round_end.contribute(buffer, round_number % fragments)
                del buffer[size:]
            replicas[first].round_end.apply(buffers[1], Encounter(b"", 1, 1), own_first=True)
            replicas[second].round_end.apply(buffers[0], Encounter(b"", 1, 1), own_first=False)
        expected = rows(replicas)
        apart = (weights(stack, expected) - expected).abs()
        assert float((apart > 1e-4).float().mean()) < (2e-3 if outer.is_lossy else 1e-9)


@pytest.mark.parametrize(
    "method",
    [
        Method("synchronous, Muon", "gradients", optimizer="muon"),
        Method("DiLoCo", "all", 2, DiLoCoConfig()),
        Method("Nesterov, Muon, late", "pairs", 2, NoLoCoConfig(momentum="nesterov"), 1, "muon"),
        Method("two partners", "pairs", 2, PlainConfig(), exchanges=2),
        Method("GASLoC", "pairs", 2, GASLoCConfig()),
        Method("CO2", "pairs", 2, CO2Config(), 2),
        Method("fragments apart, momentum", "pairs", 2, FRAGMENTS, 0, "muon", 1.0, 2, 0.9, "int4", 2),
        Method("two bits", "all", 2, DiLoCoConfig(error_feedback=True, two_bits=True)),
        Method("nobody averages", "none"),
    ],
    ids=str,
)
def test_trials_in_one_stack_do_as_each_alone(model: ModelConfig, samplers: list[Sampler], method: Method) -> None:
    trials = [Trial(1, 1.0, samplers), Trial(2, 2.0, samplers[::-1])]
    stack = trained(method, model, trials, 7)
    batches = [samplers[0].held_out_batch(index) for index in range(2)]
    losses, spreads = stack.losses(batches), stack.spreads()
    for index, trial in enumerate(trials):
        alone = trained(method, model, [trial], 7)
        theta = stack.theta.view(2, -1, stack.theta.size(1))[index]
        torch.testing.assert_close(theta, alone.theta, rtol=1e-4, atol=2e-5)
        assert losses[index] == pytest.approx(alone.losses(batches)[0], abs=1e-4)
        assert spreads[index] == pytest.approx(alone.spreads()[0], rel=1e-2, abs=1e-6)


def test_synchronous_training_is_one_model_on_all_batches(model: ModelConfig, samplers: list[Sampler]) -> None:
    together = trained(Method("together", "gradients"), model, [Trial(1, 1.0, samplers)], 5)
    alone = Stack(Method("alone", "none"), [build_model(model, 1)], INNER, [Trial(1, 1.0, samplers[:1])], CPU)
    for step in range(5):
        alone.inner_step(np.concatenate([sampler.batch(step) for sampler in samplers])[None])
    assert torch.equal(together.theta, alone.theta)


@pytest.mark.parametrize("outer", [NoLoCoConfig(momentum="nesterov"), DiLoCoConfig()])
def test_diloco_keeps_everybody_alike_and_steps_by_the_mean(
    model: ModelConfig, samplers: list[Sampler], outer: OuterConfig
) -> None:
    trials = [Trial(1, 1.0, samplers)]
    apart = trained(Method("apart", "none"), model, trials, 3)
    diloco = trained(Method("DiLoCo", "all", 3, outer), model, trials, 3)
    start = Stack(Method("alone", "none"), [build_model(model, 1)], INNER, [Trial(1, 1.0, samplers[:1])], CPU).theta
    expected = OwnVectors(start.clone(), start, {"momentum": torch.zeros_like(start)})
    rule = rule_for(outer)
    contributions = [rule.contribution(replace(expected, fast=theta[None])) for theta in apart.theta]
    rule.step(expected, Meeting(contributions, [0.25] * 4))
    assert diloco.spreads()[0] < 1e-7
    torch.testing.assert_close(diloco.theta[:1], expected.slow, rtol=1e-5, atol=1e-6)
    assert apart.spreads()[0] > 1e-3


def test_each_fragment_of_a_round_meets_a_partner_of_its_own(model: ModelConfig, samplers: list[Sampler]) -> None:
    seed = 2
    trials, outer = [Trial(seed, 1.0, samplers)], NoLoCoConfig(alpha=0.0, beta=1.0, gamma=1.0, fragments=2)
    apart = trained(Method("apart", "none"), model, trials, 3).theta
    stack = trained(Method("fragments", "pairs", 3, outer, exchanges=2), model, trials, 3)
    pairings = [groups_of("pairs", 4, seed, step=2, exchange=fragment) for fragment in range(2)]
    assert sorted(map(sorted, pairings[0])) != sorted(map(sorted, pairings[1])), "or this shows nothing"
    layout = layout_of(build_model(model, 0), "fp32")
    for fragment, pairs in enumerate(pairings):
        part = layout.fragments(2)[fragment]
        for first, second in pairs:
            mean = (apart[first, part] + apart[second, part]) / 2
            torch.testing.assert_close(stack.theta[first, part], mean)
            torch.testing.assert_close(stack.theta[second, part], mean)


@pytest.mark.parametrize("group", ["pairs", "all"])
def test_averaged_momenta_come_together_and_keep_their_sum(
    model: ModelConfig, samplers: list[Sampler], group: Group
) -> None:
    stack = trained(Method("apart", "none", optimizer="muon"), model, [Trial(1, 1.0, samplers)], 3)
    before = stack.momenta.clone()
    for exchange in range(8):
        stack.send_momenta("int4")
        stack.average_momenta(groups_of(group, 4, 1, 2, exchange))
    torch.testing.assert_close(stack.momenta.mean(0), before.mean(0), rtol=0, atol=1e-6)
    assert float(stack.momenta.std(0).mean()) < 0.2 * float(before.std(0).mean())


def test_the_next_inner_step_takes_the_averaged_momenta(model: ModelConfig, samplers: list[Sampler]) -> None:
    """With all, and in fp32: replicas of equal weights that take one batch then step their matrices alike."""
    trials = [Trial(1, 1.0, samplers)]
    kept = Method("kept", "all", 3, PlainConfig(), optimizer="muon")
    module = build_model(model, 0)
    places, matrices = layout_of(module, "fp32").places(), matrices_of(module)
    apart = []
    for method in (kept, replace(kept, momentum_codec="fp32")):
        stack = trained(method, model, trials, 3)
        assert stack.spreads()[0] < 1e-7
        stack.inner_step(np.stack([samplers[0].batch(3)] * 4))
        apart.append(max(float(stack.theta[:, places[name]].std(0).max()) for name in matrices))
    assert apart[1] < 1e-6 < 1e-4 < apart[0]


def test_error_feedback_sends_later_what_two_bits_lose(model: ModelConfig, samplers: list[Sampler]) -> None:
    """Replicas that learn no more after a round: their slow weights come to where their mean progress led."""
    outer = DiLoCoConfig(learning_rate=1.0, alpha=0.0, error_feedback=True, two_bits=True)
    stack = trained(Method("apart", "none", outer=outer), model, [Trial(1, 1.0, samplers)], 2)
    goal, start, left = stack.theta.mean(0), stack.outer.slow[0].clone(), list[float]()
    for _ in range(30):
        stack.contribute()
        stack.outer_step([range(4)])
        assert stack.spreads()[0] < 1e-7
        left.append(float((stack.outer.slow[0] - goal).norm() / (start - goal).norm()))
    assert left[0] > 0.2
    assert left[-1] < 0.1 * left[0]


def test_a_late_outer_step_keeps_what_was_learnt_meanwhile(model: ModelConfig, samplers: list[Sampler]) -> None:
    """By hand: a contribution after the third step, its outer step after the fifth, and the last one at the end."""
    outer, trials = NoLoCoConfig(momentum="nesterov"), [Trial(1, 1.0, samplers)]
    late = trained(Method("late", "all", 3, outer, late=2), model, trials, 6)
    by_hand = Stack(Method("by hand", "all", outer=outer), [build_model(model, trials[0].seed)], INNER, trials, CPU)
    snapshot = torch.empty(0)
    for step in range(6):
        by_hand.inner_step(np.stack([sampler.batch(step) for sampler in samplers]))
        if step == 2:
            snapshot = by_hand.theta.clone()
            by_hand.contribute()
        if step == 4:
            progress = by_hand.theta - snapshot
            by_hand.outer_step([range(4)], is_late=True)
            torch.testing.assert_close(by_hand.theta, by_hand.outer.slow + progress)
    by_hand.contribute()
    by_hand.outer_step([range(4)])
    torch.testing.assert_close(late.theta, by_hand.theta)


@pytest.mark.parametrize("late", [0, 2])
def test_the_last_inner_step_ends_a_round(model: ModelConfig, samplers: list[Sampler], late: int) -> None:
    """Otherwise methods with long rounds would be evaluated further away from an outer step than others."""
    trials = [Trial(1, 1.0, samplers)]
    cut_short = trained(Method("DiLoCo", "all", 3, DiLoCoConfig(), late), model, trials, 5)
    assert torch.equal(cut_short.theta, cut_short.outer.slow)
    assert cut_short.spreads()[0] < 1e-7


def test_a_merged_loss_is_that_of_the_mean(
    make_replica: MakeReplica, model: ModelConfig, samplers: list[Sampler]
) -> None:
    stack = trained(Method("apart", "none"), model, [Trial(1, 1.0, samplers)], 3)
    batch, replica = samplers[0].held_out_batch(0), make_replica(bytes(32))
    flat = replica.round_end.weights.flat
    flat.copy_(stack.theta.mean(0)[: len(flat)])
    alone = float(language_loss(replica.replica.module, torch.from_numpy(batch)).detach())
    assert stack.losses([batch], merged=True) == [pytest.approx(alone)]
    assert stack.losses([batch]) != [pytest.approx(alone)]


def test_every_method_trains_an_odd_number_too(model: ModelConfig, samplers: list[Sampler]) -> None:
    for method in methods(interval=2):
        stack = trained(method, model, [Trial(1, 1.0, samplers[:3])], 4)
        assert stack.steps == 4
        assert bool(stack.theta.isfinite().all())


def test_a_gradient_that_is_not_finite_is_no_result(model: ModelConfig, samplers: list[Sampler]) -> None:
    stack = trained(Method("pairs", "pairs"), model, [Trial(1, 1.0, samplers)], 1)
    stack.theta[1, 5] = torch.inf
    stack.inner_step(np.stack([samplers[0].batch(0)] * 4))
    with pytest.raises(TrainingError, match="not finite"):
        stack.losses([samplers[0].held_out_batch(0)])


def test_a_stack_is_freed_without_the_garbage_collector(model: ModelConfig, samplers: list[Sampler]) -> None:
    """Otherwise the next method finds the GPU's memory taken."""
    method = Method("late", "pairs", 2, NoLoCoConfig(momentum="nesterov", codec="int4"), 1, "muon")
    gc.disable()
    try:
        stack = trained(method, model, [Trial(1, 1.0, samplers)], 3)
        stack.losses([samplers[0].held_out_batch(0)])
        freed = weakref.ref(stack.theta)
        del stack
        assert freed() is None
    finally:
        gc.enable()


def test_adapters_split_from_a_mean_of_products_multiply_to_it(samplers: list[Sampler]) -> None:
    """If the members' products have together no more than an adapter's rank: their A span one space."""
    base = dict(build_model(MODEL, 0).named_parameters())
    method = next(each for each in METHODS if each.name == "the product, split")
    stack = AdapterStack(method, base, INNER, [Trial(0, 1.0, samplers[:2])])
    generator = torch.Generator().manual_seed(0)
    views = stack.views()
    for name, view in views.items():  # (members, rows, columns)
        view.normal_(generator=generator)
        if name.endswith(".A"):
            view[1] = view[0] + 0.2 * view[1, :, :RANK] @ view[0]
    names = [name.removesuffix(".A") for name in views if name.endswith(".A")]
    before = [(views[f"{name}.B"] @ views[f"{name}.A"]).mean(0) for name in names]
    stack.outer_step([[0, 1]])
    for name, mean in zip(names, before, strict=True):
        for found in views[f"{name}.B"] @ views[f"{name}.A"]:
            torch.testing.assert_close(found, mean, rtol=1e-3, atol=1e-4)
