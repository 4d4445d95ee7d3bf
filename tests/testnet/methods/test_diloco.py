"""The outer rule that only `testnet compare` knows."""

from dataclasses import replace

import pytest
import torch

from farandole.protocol.run.rules import Momentum
from farandole.testnet.methods.diloco import DiLoCo, DiLoCoConfig
from farandole.training.outer.rule import Meeting, OwnVectors


@pytest.mark.parametrize("momentum", ["nesterov", "heavy_ball"])
def test_diloco_is_torchs_sgd_on_the_mean_outer_gradient(momentum: Momentum) -> None:
    rule = DiLoCo(DiLoCoConfig(learning_rate=0.7, alpha=0.9, momentum=momentum))
    phi, *progress = torch.randn(7, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    oracle = torch.nn.Parameter(phi.clone())
    optimizer = torch.optim.SGD([oracle], lr=0.7, momentum=0.9, nesterov=momentum == "nesterov")
    own = OwnVectors(phi.clone(), phi.clone(), {"momentum": torch.zeros_like(phi)})

    for first, second in zip(progress[::2], progress[1::2], strict=True):
        oracle.grad = -(0.25 * first + 0.75 * second)
        optimizer.step()
        contributions = [rule.contribution(replace(own, fast=own.slow + each)) for each in (first, second)]
        rule.step(own, Meeting(contributions, [0.25, 0.75]))

        torch.testing.assert_close(own.slow, oracle.detach(), rtol=0, atol=1e-13)
