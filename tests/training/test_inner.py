import itertools

import pytest
import torch

from farandole.training.config import InnerConfig
from farandole.training.inner import adamw_, decay_, learning_rate

INNER = InnerConfig(learning_rate=1e-2, warmup_steps=10, total_steps=110, min_learning_rate_ratio=0.1)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_is_torchs_bit_for_bit(weight_decay: float) -> None:
    inner = InnerConfig(weight_decay=weight_decay)
    generator = torch.Generator().manual_seed(0)
    ours = torch.randn(1_001, generator=generator)
    theirs = torch.nn.Parameter(ours.clone())
    oracle = torch.optim.AdamW(
        [theirs], betas=(inner.beta1, inner.beta2), eps=inner.epsilon, weight_decay=weight_decay, foreach=False
    )
    mean, square = torch.zeros_like(ours), torch.zeros_like(ours)

    for step in range(20):
        gradient = torch.randn(1_001, generator=generator)
        rate = oracle.param_groups[0]["lr"] = learning_rate(step, inner)
        decay_(ours, rate, inner)
        adamw_(ours, gradient, mean, square, step, rate, inner)
        theirs.grad = gradient
        oracle.step()

        assert torch.equal(ours, theirs.detach())


def test_the_rate_warms_up_decays_and_stays() -> None:
    rates = [learning_rate(step, INNER) for step in range(200)]

    assert rates[:10] == pytest.approx([1e-3 * (step + 1) for step in range(10)])
    assert rates[60] == pytest.approx((1e-2 + 1e-3) / 2)
    assert rates[110:] == pytest.approx([1e-3] * 90)
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[10:]))


def test_no_warmup_and_no_decay_are_possible() -> None:
    assert learning_rate(0, InnerConfig(learning_rate=1.0, warmup_steps=0, total_steps=1)) == 1.0
    assert learning_rate(5, InnerConfig(learning_rate=1.0, warmup_steps=9, total_steps=1)) == pytest.approx(6 / 9)
