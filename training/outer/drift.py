"""Drift correction: a force on the inner steps that stands for the text that a replica does not see.

Between two exchanges a replica's own text pulls its weights w away from the others'. How far it was pulled too hard is
seen at an exchange, as the difference between the mean and w. With strength d, after an exchange

    c <- 0.98 c + d (mean - w) / (sum of the learning rates of the round's inner steps)

and every inner step adds its learning rate times c to the weights. This is the control variate of local gradient
methods (ProxSkip, arXiv 2202.09357; SCAFFOLD, arXiv 1910.06378) in the space of weights, with a memory that fades,
since the mean is a pair's and not all replicas'. It needs no traffic: the partner's weights arrive anyway.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from .rule import Meeting

# Share of the correction that stays after an exchange.
_KEPT: Final = 0.98


def correct_(drift: Tensor, meeting: Meeting, scale: float) -> None:
    """Update a piece of the correction (n,) by an exchange: the formula above, with ``scale`` = d / sum of rates."""
    drift.mul_(_KEPT).add_(meeting.mean().sub_(meeting.own), alpha=scale)


class RateSums:
    """The learning rates of inner steps, summed for each fragment since its last outer step."""

    def __init__(self, num_fragments: int) -> None:
        self._total = 0.0
        # The total at each fragment's last settled contribution; None: unknown.
        self._before: list[float | None] = [0.0] * num_fragments

    def add(self, rate: float) -> None:
        """Count an inner step."""
        self._total += rate

    def since(self, fragment: int) -> float:
        """Return the sum of the steps that a contribution of the fragment made now has; 0 if it is unknown."""
        before = self._before[fragment]
        return 0.0 if before is None else self._total - before

    def settle(self, fragment: int, total: float) -> None:
        """Note an outer step of the fragment, with a contribution that was made at this `total`."""
        self._before[fragment] = total

    @property
    def total(self) -> float:
        """Return the sum over all inner steps."""
        return self._total

    def restart(self) -> None:
        """Note that weights were loaded. With fragments, they have progress of inner steps that were not counted."""
        self._before = [self._total if len(self._before) == 1 else None for _ in self._before]
