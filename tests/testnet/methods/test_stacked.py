import gc
import weakref
from dataclasses import replace

import pytest
import torch

from farandole.protocol.run.manifest import InnerConfig, ModelConfig
from farandole.protocol.run.rules import Codec, NoLoCoConfig, PlainConfig
from farandole.testnet.methods.baselines import Ensemble, Method, Trial, train
from farandole.testnet.methods.co2 import CO2Config
from farandole.testnet.methods.diloco import DiLoCoConfig
from farandole.testnet.methods.gasloc import GASLoCConfig
from farandole.testnet.methods.stacked import Stack
from farandole.training.base.errors import TrainingError
from farandole.training.data.dataset import Sampler, Text

INNER = InnerConfig(learning_rate=3e-3, warmup_steps=3, total_steps=30, batch_size=4, weight_decay=0.1, clip=0.5)
PLAIN = NoLoCoConfig(alpha=0.0, beta=1.0, gamma=1.0)
METHODS = [
    Method("synchronous", "gradients"),
    Method("synchronous, Muon", "gradients", optimizer="muon"),
    Method("DiLoCo", "all", 2, DiLoCoConfig()),
    Method("heavy ball", "pairs", 2),
    Method("Nesterov, Muon, late", "pairs", 2, NoLoCoConfig(momentum="nesterov"), 1, "muon"),
    Method("two partners", "pairs", 2, PlainConfig(), exchanges=2),
    Method("plain mean of all", "all", 2, PlainConfig()),
    Method("GASLoC", "pairs", 2, GASLoCConfig()),
    Method("CO2", "pairs", 2, CO2Config(), 2),
    Method("nobody averages", "none"),
]


def samplers(text: Text, seed: int, number: int = 4) -> list[Sampler]:
    authors = [bytes([seed, row]) * 16 for row in range(number)]
    return [Sampler(text, run_id=bytes([seed]) * 32, author=each, batch_size=4, context=16) for each in authors]


def trials(text: Text) -> list[Trial]:
    return [Trial(1, 1.0, samplers(text, 1)), Trial(2, 2.0, samplers(text, 2))]


def stacked(method: Method, model: ModelConfig, trials: list[Trial], steps: int) -> Stack:
    stack = Stack(method, model, INNER, trials, torch.device("cpu"))
    train(method, stack, trials, steps)
    return stack


def ensemble_of(method: Method, model: ModelConfig, trial: Trial, steps: int) -> Ensemble:
    ensemble = Ensemble(method, model, INNER, trial)
    train(method, ensemble, [trial], steps)
    return ensemble


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_stack_does_what_its_ensembles_do(model: ModelConfig, text: Text, method: Method) -> None:
    stack = stacked(method, model, trials(text), 7)
    batches = [samplers(text, 1)[0].held_out_batch(index) for index in range(2)]
    losses, spreads = stack.losses(batches), stack.spreads()
    rows = stack.theta.view(2, -1, stack.theta.size(1)).clone()
    stack.merge()

    for index, trial in enumerate(trials(text)):
        ensemble = ensemble_of(method, model, trial, 7)
        size = ensemble.theta.size(1)
        torch.testing.assert_close(rows[index, :, :size], ensemble.theta, rtol=1e-4, atol=2e-5)
        assert not bool(rows[index, :, size:].any()), "what pads a row stays zero"
        assert losses[index] == pytest.approx(ensemble.losses(batches)[0], abs=1e-4)
        assert spreads[index] == pytest.approx(ensemble.spreads()[0], rel=1e-2, abs=1e-6)
        ensemble.merge()
        assert stack.losses(batches)[index] == pytest.approx(ensemble.losses(batches)[0], abs=1e-4)


@pytest.mark.parametrize("codec", ["int8", "int4", "bf16"])
def test_rounding_is_that_of_the_codec(model: ModelConfig, text: Text, codec: Codec) -> None:
    """Weights that differ by fp32's rounding may be sent as neighbouring numbers, but only few are."""
    method = Method("lossy", "pairs", 3, NoLoCoConfig(alpha=0.0, beta=1.0, gamma=1.0, codec=codec))
    exact = replace(method, outer=PLAIN)
    stack, other = (stacked(each, model, trials(text), 3) for each in (method, exact))
    ensemble = ensemble_of(method, model, trials(text)[0], 3)

    row = stack.theta[:4, : ensemble.theta.size(1)]

    assert float(((row - ensemble.theta).abs() > 1e-5).float().mean()) < 1e-3
    assert float(((row - other.theta[:4, : ensemble.theta.size(1)]).abs() > 1e-5).float().mean()) > 0.1


@pytest.mark.parametrize(
    ("outer", "number", "says"),
    [
        (NoLoCoConfig(codec="topk"), 4, "topk and fragments are compared on a CPU only"),
        (NoLoCoConfig(fragments=2), 4, "topk and fragments are compared on a CPU only"),
        (NoLoCoConfig(), 3, "an odd number of replicas is compared on a CPU only"),
    ],
)
def test_what_cannot_be_stacked_is_refused(
    model: ModelConfig, text: Text, outer: NoLoCoConfig, number: int, says: str
) -> None:
    odd = [Trial(1, 1.0, samplers(text, 1, number))]
    with pytest.raises(TrainingError, match=says):
        stacked(Method("x", "pairs", 2, outer), model, odd, 2)


def test_a_gradient_that_is_not_finite_is_no_result(model: ModelConfig, text: Text) -> None:
    stack = stacked(METHODS[3], model, trials(text), 1)
    stack.theta[1, 5] = torch.inf
    stack.inner_step(torch.stack([torch.from_numpy(samplers(text, 1)[0].batch(0))] * 8).numpy())

    with pytest.raises(TrainingError, match="not finite"):
        stack.losses([samplers(text, 1)[0].held_out_batch(0)])


def test_a_stack_is_freed_without_the_garbage_collector(model: ModelConfig, text: Text) -> None:
    """Otherwise the next method finds the GPU's memory taken."""
    gc.disable()
    try:
        stack = stacked(METHODS[4], model, trials(text), 3)
        stack.losses([samplers(text, 1)[0].held_out_batch(0)])
        rows = weakref.ref(stack.theta)
        del stack
        assert rows() is None
    finally:
        gc.enable()
