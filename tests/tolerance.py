"""A screening rule without a memory, for tests of formulas: they say what they expect of one exchange."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from farandole.protocol.run.rules import GuardConfig
from farandole.training import screening
from farandole.training.screening.rule import Accept, Partner, Refuse, ScreeningRule, Verdict, share_by_tokens


class TolerantConfig(GuardConfig, frozen=True, kw_only=True, tag_field="kind", tag="tolerant"):
    """Settings that no run file can name."""


class Tolerant(ScreeningRule):
    """Accepts what is about as large as one's own contribution, with its share of the tokens."""

    def __init__(self, settings: TolerantConfig) -> None:
        self.begin()

    def begin(self) -> None:
        self.sums = torch.zeros(2, dtype=torch.float64)

    def feed(self, own: Tensor, contribution: Tensor) -> None:
        self.sums += torch.stack((own @ own, contribution @ contribution)).cpu()

    def judge(self, partner: Partner) -> Verdict:
        own, of_partner = self.sums.tolist()
        if not own / 16 <= of_partner <= own * 16:
            return Refuse(f"the contribution's squared norm is {of_partner:.3g}, mine {own:.3g}")
        return Accept(share_by_tokens(partner.encounter.own_tokens, partner.encounter.partner_tokens))


RULE = Tolerant
TOLERANT = TolerantConfig()
sys.modules[f"{screening.__name__}.tolerant"] = sys.modules[__name__]
