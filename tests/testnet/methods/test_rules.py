"""The outer rules that only `testnet compare` knows, each against its paper's formulas or its authors' code."""

from dataclasses import replace

import pytest
import torch

from farandole.testnet.methods.co2 import CO2, CO2Config
from farandole.testnet.methods.diloco import DiLoCo, DiLoCoConfig
from farandole.testnet.methods.gasloc import GASLoC, GASLoCConfig
from farandole.training.outer.rule import Meeting, OwnVectors

GENERATOR = torch.Generator().manual_seed(0)


def members(start: torch.Tensor) -> list[OwnVectors]:
    return [OwnVectors(phi.clone(), phi.clone(), {"momentum": torch.zeros_like(phi)}) for phi in start]


@pytest.mark.parametrize("settings", [GASLoCConfig(), GASLoCConfig(learning_rate=1.0, pull=0.6, gamma=0.8)])
def test_gasloc_is_gossip_by_the_laplacian_with_momentum_on_the_iterates_after_the_local_update(
    settings: GASLoCConfig,
) -> None:
    """The formula with matrices: a ring of four, of which each replica meets one neighbour or the other in a round."""
    rule, rate, gamma = GASLoC(settings), settings.learning_rate, settings.gamma
    start = torch.randn(4, 20, generator=GENERATOR, dtype=torch.float64)
    replicas = members(start)
    theta, last = start.clone(), start.clone()  # the oracle's weights and its y of the round before

    for pairs in ([(0, 1), (2, 3)], [(1, 2), (3, 0)], [(0, 1), (2, 3)], [(0, 2), (1, 3)]):
        progress = torch.randn(4, 20, generator=GENERATOR, dtype=torch.float64)
        laplacian = torch.zeros(4, 4, dtype=torch.float64)
        for i, j in pairs:
            edge = torch.zeros(4, dtype=torch.float64)
            edge[i], edge[j] = 1.0, -1.0
            laplacian += torch.outer(edge, edge)
        updated = theta + rate * progress
        theta = updated - settings.pull / 2 * laplacian @ updated + gamma * (updated - last)
        last = updated

        for own, each in zip(replicas, progress, strict=True):
            own.fast.copy_(own.slow + each)
        for pair in pairs:
            contributions = [rule.contribution(replicas[row]).clone() for row in pair]
            for place, row in enumerate(pair):
                rule.step(replicas[row], Meeting(contributions, [0.5, 0.5], place))

        torch.testing.assert_close(torch.stack([own.slow for own in replicas]), theta, rtol=0, atol=1e-12)


def test_a_late_movement_enters_co2s_momentum_divided_by_the_gap() -> None:
    """The steps of the authors' code, number by number: its momentum has the other sign."""
    rule = CO2(CO2Config(learning_rate=0.8, alpha=0.6, gap_penalty=4.0))
    start, *fast = torch.randn(9, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    own = OwnVectors(start.clone(), start.clone(), {"momentum": torch.zeros_like(start)})
    old, momentum = start.tolist(), [0.0] * 20

    for is_late, one, other in zip((False, True, True, False), fast[::2], fast[1::2], strict=True):
        gap = 4.0 if is_late else 1.0
        for i in range(20):
            mean = 0.75 * float(one[i]) + 0.25 * float(other[i])
            momentum[i] = 0.6 * momentum[i] - mean / gap + old[i] / gap
            old[i] -= 0.8 * momentum[i]

        rule.step(own, Meeting([one, other], [0.75, 0.25], is_late=is_late))

        torch.testing.assert_close(own.slow.tolist(), old, rtol=0, atol=1e-13)


def test_diloco_is_torchs_sgd_on_the_mean_outer_gradient() -> None:
    rule = DiLoCo(DiLoCoConfig(learning_rate=0.7, alpha=0.9))
    phi, *progress = torch.randn(7, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    oracle = torch.nn.Parameter(phi.clone())
    optimizer = torch.optim.SGD([oracle], lr=0.7, momentum=0.9, nesterov=True)
    own = OwnVectors(phi.clone(), phi.clone(), {"momentum": torch.zeros_like(phi)})

    for first, second in zip(progress[::2], progress[1::2], strict=True):
        oracle.grad = -(0.25 * first + 0.75 * second)
        optimizer.step()
        contributions = [rule.contribution(replace(own, fast=own.slow + each)) for each in (first, second)]
        rule.step(own, Meeting(contributions, [0.25, 0.75]))

        torch.testing.assert_close(own.slow, oracle.detach(), rtol=0, atol=1e-13)
