"""The end of a round's inner steps, and how far they have moved a replica."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .contribution import Contribution
from .outer_state import OuterState


@dataclass(frozen=True, slots=True)
class EndedRound:
    """The state of a replica at the end of a round's inner steps."""

    contribution: Contribution
    fragment: int
    steps: int
    """Inner steps that the replica had taken."""
    tokens: int
    """Tokens of the round."""
    rates: float
    """Sum of the learning rates of the inner steps behind the contribution; 0 if it is unknown."""
    rates_total: float
    """`RateSums.total` at the contribution."""
    has_steps: bool
    """Whether inner steps were taken since the contribution before."""
    ramp: float
    """The mean share of the schedule's learning rate at which these steps were taken."""


class Movements:
    """How far the inner steps of a round have moved a replica. A round without any counts as the last one with some.

    ``last``: a vector (n,) for what the steps of that round changed, where rounds without any follow.
    """

    def __init__(self, outer: OuterState, last: Tensor | None) -> None:
        self._outer = outer
        self._last = last
        self._norm = 0.0
        self._of: Contribution | None = None

    def norm(self, ended: EndedRound) -> float:
        """See `Partner.movement`; computed once for each contribution."""
        if ended.has_steps and self._of is not ended.contribution:
            self._norm = self._outer.distance_to_slow(ended.contribution) / ended.ramp
            self._of = ended.contribution
        return self._norm

    def alignment(self, ended: EndedRound, contribution: Tensor) -> float:
        """See `Partner.alignment`, with a contribution (n,)."""
        if not ended.has_steps and self._last is None:
            return 0.0
        return self._outer.alignment(ended.contribution, contribution, None if ended.has_steps else self._last)

    def keep(self, ended: EndedRound) -> None:
        """Keep what the inner steps changed, before the outer step, for the rounds without any that follow."""
        made = ended.contribution
        if self._last is not None and ended.has_steps:
            self._outer.movement(made, self._last[made.part])
