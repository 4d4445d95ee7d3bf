"""NoLoCo's outer step (arXiv 2506.10911) as functions on tensors; everything here is elementwise.

A replica i has slow weights phi, fast weights theta (after its inner steps from phi) and outer momentum m. It meets
one partner; means are over the two, weighted by the tokens that each trained on in the round:

    G_i   = beta mean_j(theta_j - phi_j) + gamma (mean_j(phi_j) - phi_i)
    m_i  <- alpha m_i + G_i
    heavy ball:  phi_i <- phi_i + m_i
    Nesterov:    phi_i <- phi_i + G_i + alpha m_i        with the new m_i

The first is what the paper's equation 32 and its code compute (equation 2 prints the sign of beta wrongly, and the
method is called Nesterov throughout); the second is Nesterov's as in `torch.optim.SGD(nesterov=True)`, DiLoCo's outer
optimizer (arXiv 2311.08105), with the step size inside G. The term with gamma pulls replicas together.

The paper's code sends two vectors, theta - phi and phi. One is enough, since G is linear in them:

    G_i   = beta mean_j(w_j) - gamma phi_i               with w_j = theta_j + (gamma / beta - 1) phi_j

That w is the **contribution**. With gamma = beta, the default, it is theta itself, so a codec that is exact for the
weights is exact for the step. The two forms agree to rounding.
"""

from __future__ import annotations

from torch import Tensor

from farandole.protocol.manifest import OuterConfig


def contribution(theta: Tensor, phi: Tensor, outer: OuterConfig) -> Tensor:
    """What a replica sends, w = theta + (gamma / beta - 1) phi; with gamma = beta it is ``theta`` itself, no copy."""
    if outer.gamma == outer.beta:
        return theta
    return theta + (outer.gamma / outer.beta - 1.0) * phi


# The number of tokens is the partner's word. Whatever it says, the other one keeps this share of the mean; honest pairs
# reach it when one is twenty times as fast.
MIN_SHARE = 0.05


def partner_shares(first_tokens: int, second_tokens: int) -> tuple[float, float]:
    """Weights of two contributions in their mean: by tokens, at least `MIN_SHARE`, and equal if neither saw any."""
    total = first_tokens + second_tokens
    if total == 0:
        return 0.5, 0.5
    lesser = max(min(first_tokens, second_tokens) / total, MIN_SHARE)
    return (lesser, 1.0 - lesser) if first_tokens < second_tokens else (1.0 - lesser, lesser)


def weighted_mean(first: Tensor, second: Tensor, shares: tuple[float, float]) -> Tensor:
    """The mean of two contributions. Both partners must pass them in the same order to get the same bits.

    Products and sum are separate operations: fused, their rounding would depend on the machine.
    """
    return (first * shares[0]).add_(second * shares[1])


def outer_step(phi: Tensor, momentum: Tensor, mean: Tensor, outer: OuterConfig) -> tuple[Tensor, Tensor]:
    """New (phi, m) from the mean of the contributions (one's own, when alone).

    phi's own terms are gathered, so that with alpha = 0, beta = gamma = 1 the new phi is the mean to the last bit.
    """
    alpha, beta, gamma = outer.alpha, outer.beta, outer.gamma
    carried, pull = alpha * momentum, beta * mean
    new_momentum = (pull - gamma * phi).add_(carried)
    if outer.momentum == "heavy_ball":
        return ((1.0 - gamma) * phi).add_(pull).add_(carried), new_momentum
    # phi + G + alpha (alpha m + G) = phi + (1 + alpha) G + alpha^2 m
    lead = 1.0 + alpha
    return ((1.0 - lead * gamma) * phi).add_((lead * beta) * mean).add_((alpha * alpha) * momentum), new_momentum


def outer_step_of_two_vectors(
    phi: Tensor, momentum: Tensor, mean_gradient: Tensor, mean_phi: Tensor, outer: OuterConfig
) -> tuple[Tensor, Tensor]:
    """New (phi, m) as the paper writes it, from the means of theta - phi and of phi: the reference for the above."""
    pull = outer.beta * mean_gradient + outer.gamma * (mean_phi - phi)
    new_momentum = outer.alpha * momentum + pull
    step = new_momentum if outer.momentum == "heavy_ball" else pull + outer.alpha * new_momentum
    return phi + step, new_momentum
