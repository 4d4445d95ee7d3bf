"""SparseLoCo's outer step (arXiv 2508.15706): few elements of the outer gradient, and memory of the rest.

With the paper's names, replica r sends the largest elements of what it has not sent yet, quantized, and keeps the rest:

    Delta_r = phi - theta_r
    e_r    <- beta e_r + Delta_r
    s_r     = Q(Top-k(e_r))
    e_r    <- e_r - s_r
    phi    <- phi - learning_rate mean_r(s_r)

The memory takes the place of the outer momentum. Source: the paper's abstract, and its algorithm as a catalogue of
optimizers gives it (github.com/junaidaliop/zij, canon/math/sparseloco.md); the paper was not at hand.

Top-k and Q are `few_of` (of each 256 elements 8, in 8 bits; the paper has 2 bits and other blocks). Here all signs are
turned, the ``residual`` is -e, and what is sent is not s but the weights that it leads to:

    v_r = phi + beta residual_r + (theta_r - phi)        an element that is not sent counts as phi
    residual_r <- v_r - (v_r as sent)
    phi <- phi + learning_rate (mean_r(v_r as sent) - phi)

While all replicas share phi, this is the paper's step. In pairs phi differs from replica to replica, and steps by
differences alone would let them drift apart; by weights, each element that is sent also pulls slow weights together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from farandole.protocol.run.rules import SCALE_BYTES, OuterConfig
from farandole.training.outer.codec import MIN_SCALE
from farandole.training.outer.rule import Meeting, OuterRule, OwnVectors


class SparseLoCoConfig(OuterConfig, frozen=True, kw_only=True, tag_field="kind", tag="sparseloco"):
    """Settings of SparseLoCo. Contributions travel as `few_of`, whatever the codec."""

    learning_rate: float = 1.0
    beta: float = 0.95
    """Share of what was not sent that a round keeps."""

    vectors = ("residual",)


class SparseLoCo(OuterRule):
    """SparseLoCo. Of an element that is not sent, its receivers take their slow weights."""

    keeps_own_exact = False  # what is not sent is kept in the residual

    def __init__(self, settings: SparseLoCoConfig) -> None:
        self._settings = settings

    def contribution(self, own: OwnVectors) -> Tensor:
        """The weights v."""
        return self._settings.beta * own.vectors["residual"] + own.fast

    def step(self, own: OwnVectors, meeting: Meeting) -> None:
        """The formulas above; alone, everything counts as sent."""
        rate = self._settings.learning_rate
        own.vectors["residual"].copy_(self.contribution(own) - meeting.contributions[meeting.own_place])
        own.slow.mul_(1.0 - rate).add_(rate * meeting.mean())


# Of each block, how many are sent: 8 are 3 %, the paper sends 1 to 3 %. They are multiples of a scale, up to so many.
_BLOCK, _FEW, _LEVELS = 256, 8, 127
FEW_BYTES = (SCALE_BYTES + 2 * _FEW) / _BLOCK
"""Bytes that an element takes: its share of a block's scale, numbers and places."""


def few_of(values: Tensor, slow: Tensor) -> Tensor:
    """Return what is sent of (n,) fp32: of each 256, the 8 furthest from ``slow``, in 8 bits; NaN for the others.

    n is a multiple of 256.
    """
    blocks = values.view(-1, _BLOCK)
    places = (blocks - slow.view(-1, _BLOCK)).abs().topk(_FEW, dim=1).indices
    chosen = blocks.gather(1, places)
    scale = (chosen.abs().amax(1, keepdim=True) / _LEVELS).clamp(min=MIN_SCALE)
    return torch.full_like(blocks, torch.nan).scatter_(1, places, (chosen / scale).round() * scale).view_as(values)
