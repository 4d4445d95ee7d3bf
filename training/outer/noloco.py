"""NoLoCo's outer step (arXiv 2506.10911).

A replica i has slow weights phi, fast weights theta (after its inner steps from phi) and outer momentum m. It meets
one partner; means are over the two, with the weights that the screening of both gives them:

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

from farandole.protocol.run.rules import NoLoCoConfig

from .rule import Meeting, OuterRule, OwnVectors


class NoLoCo(OuterRule):
    """NoLoCo, with heavy ball or Nesterov's momentum."""

    def __init__(self, settings: NoLoCoConfig) -> None:
        self._settings = settings
        self.sends_fast_weights = settings.gamma == settings.beta

    def contribution(self, own: OwnVectors) -> Tensor:
        """W = theta + (gamma / beta - 1) phi; with gamma = beta it is theta itself."""
        if self.sends_fast_weights:
            return own.fast
        return own.fast + (self._settings.gamma / self._settings.beta - 1.0) * own.slow

    def step(self, own: OwnVectors, meeting: Meeting) -> None:
        """Both formulas above.

        phi's own terms are gathered, so that with alpha = 0, beta = gamma = 1 the new phi is the mean to the last bit.
        """
        alpha, beta, gamma = self._settings.alpha, self._settings.beta, self._settings.gamma
        phi, momentum = own.slow, own.vectors["momentum"]
        mean = meeting.mean()
        carried, pull = alpha * momentum, beta * mean
        new_momentum = (pull - gamma * phi).add_(carried)
        if self._settings.momentum == "heavy_ball":
            new_phi = ((1.0 - gamma) * phi).add_(pull).add_(carried)
        else:  # phi + G + alpha (alpha m + G) = phi + (1 + alpha) G + alpha^2 m
            lead = 1.0 + alpha
            new_phi = ((1.0 - lead * gamma) * phi).add_((lead * beta) * mean).add_((alpha * alpha) * momentum)
        phi.copy_(new_phi)
        momentum.copy_(new_momentum)


RULE = NoLoCo
