"""DiLoCo's outer step (arXiv 2311.08105): SGD with momentum, whose gradient is the mean of the replicas' progress.

All replicas have the same slow weights phi and send their outer gradient theta - phi; the mean is over all of them:

    G    = learning_rate mean_j(theta_j - phi)
    m   <- alpha m + G
    phi <- phi + G + alpha m  (Nesterov, as published), or phi + m (heavy ball)

This is `torch.optim.SGD` on phi with the gradient -mean_j(theta_j - phi). Means over a part of the replicas would let
their slow weights drift apart, since nothing here pulls them together; `noloco` has the term that does.
"""

from __future__ import annotations

from torch import Tensor

from farandole.protocol.run.rules import Momentum, OuterConfig
from farandole.training.outer.rule import Meeting, OuterRule, OwnVectors


class DiLoCoConfig(OuterConfig, frozen=True, kw_only=True, tag_field="kind", tag="diloco"):
    """Settings of DiLoCo."""

    learning_rate: float = 0.7
    alpha: float = 0.9
    """Share of the momentum that an outer step keeps."""
    momentum: Momentum = "nesterov"

    vectors = ("momentum",)


class DiLoCo(OuterRule):
    """DiLoCo, with Nesterov's momentum or heavy ball."""

    keeps_own_exact = False  # the slow weights of all replicas stay equal

    def __init__(self, settings: DiLoCoConfig) -> None:
        self._settings = settings

    def contribution(self, own: OwnVectors) -> Tensor:
        """The outer gradient, theta - phi."""
        return own.fast - own.slow

    def step(self, own: OwnVectors, meeting: Meeting) -> None:
        """The formulas above."""
        momentum = own.vectors["momentum"]
        progress = self._settings.learning_rate * meeting.mean()
        momentum.mul_(self._settings.alpha).add_(progress)
        if self._settings.momentum == "heavy_ball":
            own.slow.add_(momentum)
        else:
            own.slow.add_(progress.add_(self._settings.alpha * momentum))
