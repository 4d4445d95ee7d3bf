"""CO2's outer step (arXiv 2401.16265): momentum, with a penalty on what arrives late.

Where an exchange overlaps with the next inner steps, its outer step comes late: it moves weights that have moved on.
CO2 divides such a movement by the staleness gap Lambda before it enters the momentum:

    m   <- alpha m + (mean_j(theta_j) - phi) / Lambda
    phi <- phi + learning_rate m

Source: the authors' code (github.com/weigao266/fairscale-CO2, `_perform_local_optimization` in
fairscale/experimental/nn/data_parallel/gossip/co2.py), with its signs turned. Lambda is a constant there; the paper
computes it in each round, by a formula that was not at hand. Here it is 1 for steps that are not late, as they have no
gap. The paper's other means, momentum clipping, is left out.

As the mean is of weights, it pulls replicas together, so pairs can use it.
"""

from __future__ import annotations

from torch import Tensor

from farandole.protocol.run.rules import OuterConfig
from farandole.training.outer.rule import Meeting, OuterRule, OwnVectors


class CO2Config(OuterConfig, frozen=True, kw_only=True, tag_field="kind", tag="co2"):
    """Settings of CO2."""

    learning_rate: float = 0.7
    alpha: float = 0.5
    """Share of the momentum that an outer step keeps."""
    gap_penalty: float = 2.0
    """Lambda of a late outer step. 1: no penalty."""

    vectors = ("momentum",)


class CO2(OuterRule):
    """CO2 with a constant staleness gap."""

    sends_fast_weights = True

    def __init__(self, settings: CO2Config) -> None:
        self._settings = settings

    def contribution(self, own: OwnVectors) -> Tensor:
        """The fast weights."""
        return own.fast

    def step(self, own: OwnVectors, meeting: Meeting) -> None:
        """The formulas above."""
        momentum = own.vectors["momentum"]
        gap = self._settings.gap_penalty if meeting.is_late else 1.0
        momentum.mul_(self._settings.alpha).add_((meeting.mean() - own.slow).div_(gap))
        own.slow.add_(self._settings.learning_rate * momentum)
