"""Plain averaging: the slow weights become the mean of the fast weights.

    phi <- mean_j(theta_j)

This is local SGD (arXiv 1805.09767) with the mean over a group. It equals `noloco` with alpha = 0, beta = gamma = 1 to
the bit, but keeps no momentum: a replica needs 4 bytes less for each parameter in memory and on disk, and a newcomer
downloads half as much. In pairs each exchange halves the difference between the two, so it is always stable.
"""

from __future__ import annotations

from torch import Tensor

from farandole.protocol.run.rules import PlainConfig

from .rule import Meeting, OuterRule, OwnVectors


class PlainAverage(OuterRule):
    """The mean, without state."""

    sends_fast_weights = True

    def __init__(self, settings: PlainConfig) -> None:
        """``settings`` has none of its own."""

    def contribution(self, own: OwnVectors) -> Tensor:
        """The fast weights."""
        return own.fast

    def step(self, own: OwnVectors, meeting: Meeting) -> None:
        """The formula above."""
        own.slow.copy_(meeting.mean())


RULE = PlainAverage
