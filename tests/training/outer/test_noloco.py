from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from farandole.protocol.run.rules import Momentum, NoLoCoConfig, gamma_limit
from farandole.training.outer.rule import Meeting, OwnVectors, rule_of
from farandole.training.screening.rule import MIN_SHARE, share_by_tokens

MOMENTA: list[Momentum] = ["heavy_ball", "nesterov"]
constants = st.builds(
    NoLoCoConfig,
    alpha=st.floats(0, 0.95),
    beta=st.floats(0.1, 1.5),
    gamma=st.floats(0.1, 1.5),
    momentum=st.sampled_from(MOMENTA),
)
token_counts = st.integers(0, 2**50)


def vectors(seed: int) -> list[Tensor]:
    return list(torch.randn(6, 50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def contribution(theta: Tensor, phi: Tensor, outer: NoLoCoConfig) -> Tensor:
    return rule_of(outer).contribution(OwnVectors(theta, phi, {}))


def shares_of(first_tokens: int, second_tokens: int) -> tuple[float, float]:
    """Each as the other one computes it."""
    return share_by_tokens(second_tokens, first_tokens), share_by_tokens(first_tokens, second_tokens)


def outer_step(
    phi: Tensor, m: Tensor, contributions: Sequence[Tensor], weights: Sequence[float], outer: NoLoCoConfig
) -> tuple[Tensor, Tensor]:
    own = OwnVectors(phi, phi.clone(), {"momentum": m.clone()})
    rule_of(outer).step(own, Meeting(contributions, weights))
    return own.slow, own.vectors["momentum"]


def outer_step_of_two_vectors(
    phi: Tensor, momentum: Tensor, mean_gradient: Tensor, mean_phi: Tensor, outer: NoLoCoConfig
) -> tuple[Tensor, Tensor]:
    """New (phi, m) as the paper writes it, from the means of theta - phi and of phi."""
    pull = outer.beta * mean_gradient + outer.gamma * (mean_phi - phi)
    new_momentum = outer.alpha * momentum + pull
    step = new_momentum if outer.momentum == "heavy_ball" else pull + outer.alpha * new_momentum
    return phi + step, new_momentum


def test_nesterov_is_torchs_sgd_when_replicas_agree() -> None:
    outer = NoLoCoConfig(alpha=0.9, beta=0.3, gamma=0.3, momentum="nesterov")
    phi, _, _, *outer_gradients = vectors(1)
    oracle = torch.nn.Parameter(phi.clone())
    optimizer = torch.optim.SGD([oracle], lr=0.3, momentum=0.9, nesterov=True)
    m = torch.zeros_like(phi)

    for gradient in outer_gradients:
        oracle.grad = -gradient
        optimizer.step()
        phi, m = outer_step(phi, m, [phi + gradient], [1.0], outer)

        torch.testing.assert_close(phi, oracle.detach(), rtol=0, atol=1e-14)


@given(constants, token_counts, token_counts, st.integers(0, 1_000))
def test_one_vector_does_what_two_do(outer: NoLoCoConfig, first: int, second: int, seed: int) -> None:
    theta_1, phi_1, m_1, theta_2, phi_2, _ = vectors(seed)
    shares = shares_of(first, second)

    contributions = contribution(theta_1, phi_1, outer), contribution(theta_2, phi_2, outer)
    one = outer_step(phi_1, m_1, contributions, shares, outer)
    two = outer_step_of_two_vectors(
        phi_1,
        m_1,
        Meeting([theta_1 - phi_1, theta_2 - phi_2], shares).mean(),
        Meeting([phi_1, phi_2], shares).mean(),
        outer,
    )

    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


@given(token_counts, token_counts)
def test_shares_are_a_mean_and_the_partners_mirror(first: int, second: int) -> None:
    share, other = shares_of(first, second)

    assert share + other == 1.0
    assert (1.0 - share, 1.0 - other) == (other, share)  # to the bit: each partner computes both from one
    assert min(share, other) >= MIN_SHARE  # a peer that claims all the tokens in the world does not get all the mean
    if min(first, second) >= MIN_SHARE * (first + second) > 0:
        assert share == pytest.approx(first / (first + second), abs=2.0**-24)  # shares are whole numbers of steps


def widest(outer: NoLoCoConfig, rounds: int = 400, replicas: int = 256) -> float:
    """Standard deviation, across replicas, after outer steps in random pairs with nothing learned in between."""
    generator = torch.Generator().manual_seed(0)
    phi = torch.randn(replicas, 8, generator=generator, dtype=torch.float64)
    m = torch.zeros_like(phi)
    for _ in range(rounds):
        order = torch.randperm(replicas, generator=generator)
        means = torch.empty_like(phi)
        means[order] = phi[order].view(-1, 2, 8).mean(1).repeat_interleave(2, 0)
        phi, m = outer_step(phi, m, [contribution(means, means, outer)], [1.0], outer)
    return float(phi.std())


@pytest.mark.parametrize(
    ("momentum", "alpha", "limit"),
    # 2 (1 - alpha^2), and for Nesterov (2 a^2 - 1 + sqrt(1 + 4a + 4a^2 - 4a^3 - 4a^4)) / (a (2a + 1)): where the
    # second moments of random pairs stop contracting.
    [("heavy_ball", 0.5, 1.5), ("heavy_ball", 0.9, 0.38), ("nesterov", 0.5, 1.3028), ("nesterov", 0.9, 0.8479)],
)
def test_pairs_are_stable_below_the_limit_of_gamma_only(momentum: Momentum, alpha: float, limit: float) -> None:
    def outer(gamma: float) -> NoLoCoConfig:
        return NoLoCoConfig(alpha=alpha, beta=gamma, gamma=gamma, momentum=momentum)

    assert gamma_limit(alpha, momentum) == pytest.approx(limit, rel=1e-3)
    assert widest(outer(0.9 * limit)) < 0.1
    assert widest(outer(1.15 * limit)) > 10.0
