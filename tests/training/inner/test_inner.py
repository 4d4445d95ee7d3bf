import itertools

import msgspec
import pytest
import torch
from torch import Tensor

from farandole.protocol.run.manifest import InnerConfig, InnerName, ModelConfig
from farandole.training.base.parameters import flatten_, layout_of
from farandole.training.inner.optimizer import InnerOptimizer, learning_rate, ramp
from farandole.training.model.model import build_model

INNER = InnerConfig(learning_rate=1e-2, warmup_steps=10, total_steps=110, min_learning_rate_ratio=0.1)

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device here")


def test_the_rate_warms_up_decays_and_stays() -> None:
    rates = [learning_rate(step, INNER) for step in range(200)]

    assert rates[:10] == pytest.approx([1e-3 * (step + 1) for step in range(10)])
    assert rates[60] == pytest.approx((1e-2 + 1e-3) / 2)
    assert rates[110:] == pytest.approx([1e-3] * 90)
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[10:]))


def test_a_stable_rate_falls_linearly_in_the_last_share_of_the_steps() -> None:
    inner = msgspec.structs.replace(INNER, schedule="wsd", decay_share=0.5)
    rates = [learning_rate(step, inner) for step in range(200)]

    assert rates[:10] == pytest.approx([1e-3 * (step + 1) for step in range(10)])
    assert rates[10:56] == pytest.approx([1e-2] * 46)
    assert rates[82] == pytest.approx(1e-3 + 9e-3 * 28 / 55)
    assert rates[110:] == pytest.approx([1e-3] * 90)


def test_means_that_begin_anew_are_given_twice_their_memory() -> None:
    shares = [ramp(step, InnerConfig(beta2=0.95)) for step in range(60)]
    assert shares[:40] == pytest.approx([(step + 1) / 40 for step in range(40)])
    assert shares[40:] == [1.0] * 20


@pytest.mark.parametrize(
    ("optimizer", "device"), [("adamw", "cpu"), ("muon", "cpu"), pytest.param("adamw", "cuda", marks=NEEDS_CUDA)]
)
def test_a_step_that_is_queued_is_the_same_and_counts_as_a_change(
    model: ModelConfig, optimizer: InnerName, device: str
) -> None:
    """A GPU gets this step; it may be taken on the CPU too. The fourth gradient is not finite."""
    inner = msgspec.structs.replace(INNER, optimizer=optimizer, weight_decay=0.1)
    optimizers: list[tuple[InnerOptimizer, Tensor, Tensor]] = []
    for is_queued in (False, True):
        module = build_model(model, 0).to(device if is_queued else "cpu")
        layout = layout_of(module, "fp32")
        weights, gradient = flatten_(module, layout)
        made = InnerOptimizer(inner, module, layout, weights, gradient)
        made.is_queued = is_queued
        optimizers.append((made, weights, gradient))
    generator = torch.Generator().manual_seed(0)

    for step in range(6):
        drawn = torch.randn(len(optimizers[0][1]), generator=generator)
        drawn[7] = torch.inf if step == 3 else drawn[7]
        for made, weights, gradient in optimizers:
            gradient.copy_(drawn)
            version, before = weights._version, weights.clone()
            with torch.no_grad():
                made.step(step, 2)
            assert torch.equal(weights, before) == (step == 3)
            assert weights._version > version or step == 3

    (plain, weights, _), (queued, others, _) = optimizers
    assert plain.num_skipped == queued.num_skipped == 1
    torch.testing.assert_close(weights, others.cpu(), rtol=1e-5, atol=1e-6)
    for name, flat in plain.state().items():
        torch.testing.assert_close(flat, queued.state()[name].cpu(), rtol=1e-5, atol=1e-6)
