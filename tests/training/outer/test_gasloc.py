import pytest
import torch

from farandole.protocol.run.outer_rules import GASLoCConfig, NoLoCoConfig
from farandole.training.outer.rule import Meeting, OwnVectors, rule_of

GENERATOR = torch.Generator().manual_seed(0)


def members(start: torch.Tensor) -> list[OwnVectors]:
    return [OwnVectors(phi.clone(), phi.clone(), {"momentum": torch.zeros_like(phi)}) for phi in start]


@pytest.mark.parametrize("settings", [GASLoCConfig(), GASLoCConfig(learning_rate=1.0, pull=0.6, gamma=0.8)])
def test_it_is_gossip_by_the_laplacian_with_momentum_on_the_iterates_after_the_local_update(
    settings: GASLoCConfig,
) -> None:
    """The formula with matrices: a ring of four, of which each replica meets one neighbour or the other in a round."""
    rule, rate, gamma = rule_of(settings), settings.learning_rate, settings.gamma
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


def test_without_progress_it_is_nolocos_heavy_ball_and_so_has_its_limit_of_stability() -> None:
    start = torch.randn(2, 20, generator=GENERATOR, dtype=torch.float64)
    gasloc, noloco = members(start), members(start)
    rules = (
        rule_of(GASLoCConfig(learning_rate=0.3, pull=0.9, gamma=0.5)),
        rule_of(NoLoCoConfig(alpha=0.5, beta=0.9, gamma=0.9)),
    )

    for _ in range(5):
        for rule, replicas in zip(rules, (gasloc, noloco), strict=True):
            for own in replicas:
                own.fast.copy_(own.slow)
            contributions = [rule.contribution(own).clone() for own in replicas]
            for place, own in enumerate(replicas):
                rule.step(own, Meeting(contributions, [0.5, 0.5], place))

        for one, other in zip(gasloc, noloco, strict=True):
            torch.testing.assert_close(one.slow, other.slow, rtol=0, atol=1e-14)

    assert GASLoCConfig(pull=1.4, gamma=0.5).problems == []
    assert "stable only for 0 < pull < 2 (1 - gamma^2) = 1.5" in GASLoCConfig(pull=1.5, gamma=0.5).problems[0]
