"""CO2's outer step (arXiv 2401.16265): momentum, with a penalty on what arrives late.

Where an exchange overlaps with the next inner steps, its outer step comes late: it moves weights that have moved on.
CO2 divides such a movement by the staleness gap Lambda before it enters the momentum:

    m   <- alpha m + (mean_j(theta_j) - phi) / Lambda
    phi <- phi + learning_rate m

Source: the authors' code (github.com/weigao266/fairscale-CO2, `_perform_local_optimization` in
fairscale/experimental/nn/data_parallel/gossip/co2.py), with its signs turned. There Lambda is a constant,
``co2_gap_penalty``; the paper computes it in each round, by a formula that was not at hand. Here Lambda is the
constant ``gap_penalty`` for steps that are late at this replica, and 1 for the others, as they have no gap. The
paper's other means, momentum clipping, is left out.

As the mean is of weights, it pulls replicas with other slow weights together, so pairs can use it: without late steps
this is `noloco` with heavy ball and beta = gamma = learning_rate, and has its limit of stability.
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
    """The movement of a late outer step is divided by this before it enters the momentum. 1: no penalty."""

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
        movement = meeting.mean() - own.slow
        if meeting.is_late:
            movement.div_(self._settings.gap_penalty)
        momentum.mul_(self._settings.alpha).add_(movement)
        own.slow.add_(self._settings.learning_rate * momentum)
