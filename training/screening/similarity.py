"""Refuses contributions that are far from one's own as a whole: by their norm, and by their direction.

Replicas of a run start from the same weights and are averaged all the time, so honest contributions lie close
together: with NoLoCo the weights' spread is below 1 % of their size at the end of training (BENCHMARKS.md). Four
replicas of 41 k parameters that trained for 1,000 steps, each on other text, without ever averaging, still had
cosines above 0.44 and norms within 12 % of each other. What lies far outside is another run's, damaged, or
hostile. This bounds the harm of one exchange; it does not detect a careful adversary.

What is accepted has a share of the mean by the tokens behind it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from farandole.protocol.run.screening_rules import SimilarityConfig

from .rule import Accept, Partner, Refuse, ScreeningRule, Verdict, share_by_tokens


class Similarity(ScreeningRule):
    """Three sums that add up over pieces say all: own squares, the partner's squares, products."""

    def __init__(self, settings: SimilarityConfig) -> None:
        self._settings = settings
        self.begin()

    def begin(self) -> None:
        """Zero the sums."""
        self.sums = torch.zeros(3, dtype=torch.float64)

    def feed(self, own: Tensor, contribution: Tensor) -> None:
        """Add a piece's sums, which are fp32, in fp64."""
        self.sums += torch.stack((own @ own, contribution @ contribution, own @ contribution)).cpu()

    def judge(self, partner: Partner) -> Verdict:
        """Compare norms and direction. Comparisons are such that NaN is refused."""
        own_square, partner_square, product = self.sums.tolist()
        own_norm, partner_norm = math.sqrt(own_square), math.sqrt(partner_square)
        ratio, least = self._settings.max_norm_ratio, self._settings.min_cosine
        if not own_norm / ratio <= partner_norm <= own_norm * ratio:
            return Refuse(
                f"the contribution's norm is {partner_norm:.3g}, mine {own_norm:.3g}: more than a factor of {ratio:g} "
                "apart"
            )
        if not product >= least * own_norm * partner_norm:
            cosine = product / (own_norm * partner_norm)
            return Refuse(f"the contribution's cosine with mine is {cosine:.3f}, below {least:g}")
        return Accept(share_by_tokens(partner.encounter.own_tokens, partner.encounter.partner_tokens))


RULE = Similarity
