"""GASLoC's outer step (arXiv 2606.11081): gossip, with momentum on the weights after the local update.

A replica's local update gives y, and it moves by the gossip and by the last movement of its own y:

    y_t     = phi_t + learning_rate (theta_t - phi_t)
    phi_t+1 = y_t - pull (y_t - mean_j(y_j)) + gamma (y_t - y_t-1)

Source: the update as a catalogue of optimizers gives it (github.com/junaidaliop/zij, canon/math/gasloc.md); the paper
was not at hand. The catalogue writes the gossip as alpha Lambda y with the Laplacian Lambda of the weighted graph of
exchanges: for a group with equal weights a multiple of y_t - mean_j(y_j). The defaults are this project's.

Instead of y_t-1 a replica keeps m_t = phi_t - y_t-1, the ``momentum``, since then y_t - y_t-1 = (y_t - phi_t) + m_t.
It is zero at first, as if the initial weights had been the y before. Pairs without progress are stable for
0 < pull < 2 (1 - gamma^2), as in NoLoCo.
"""

from __future__ import annotations

from torch import Tensor

from farandole.protocol.run.rules import OuterConfig
from farandole.training.outer.rule import Meeting, OuterRule, OwnVectors


class GASLoCConfig(OuterConfig, frozen=True, kw_only=True, tag_field="kind", tag="gasloc"):
    """Settings of GASLoC."""

    learning_rate: float = 0.7
    pull: float = 1.0
    """Strength of the gossip: the way from a replica's y to the mean. 1: the mean itself."""
    gamma: float = 0.5
    """Share of the last movement of y that is added again."""

    vectors = ("momentum",)


class GASLoC(OuterRule):
    """GASLoC with its momentum (the accelerated form), or without it where gamma is 0."""

    def __init__(self, settings: GASLoCConfig) -> None:
        self._settings = settings

    def contribution(self, own: OwnVectors) -> Tensor:
        """The weights y after the local update."""
        rate = self._settings.learning_rate
        return ((1.0 - rate) * own.slow).add_(rate * own.fast)

    def step(self, own: OwnVectors, meeting: Meeting) -> None:
        """The formulas above."""
        pull, momentum, updated = self._settings.pull, own.vectors["momentum"], meeting.contributions[meeting.own_place]
        carried = (updated - own.slow).add_(momentum).mul_(self._settings.gamma)
        own.slow.copy_(((1.0 - pull) * updated).add_(pull * meeting.mean()).add_(carried))
        momentum.copy_(own.slow - updated)
