"""SparseLoCo's outer step (arXiv 2508.15706): few elements of the outer gradient, and memory of the rest.

With the paper's names, replica r sends the largest elements of what it has not sent yet, quantized, and keeps the rest:

    Delta_r = phi - theta_r
    e_r    <- beta e_r + Delta_r
    s_r     = Q(Top-k(e_r))
    e_r    <- e_r - s_r
    phi    <- phi - learning_rate mean_r(s_r)

The memory takes the place of the outer momentum. Source: the paper's abstract, and its algorithm as a catalogue of
optimizers gives it (github.com/junaidaliop/zij, canon/math/sparseloco.md); the paper was not at hand.

Top-k and Q are the codec ``topk`` (of each 256 elements k, in 8 bits; the paper has 2 bits and other blocks). Here all
signs are turned, the ``residual`` is -e, and what is sent is not s but the weights that it leads to:

    v_r = phi + beta residual_r + (theta_r - phi)        an element that is not sent counts as phi
    residual_r <- v_r - (v_r as sent)
    phi <- phi + learning_rate (mean_r(v_r as sent) - phi)

While all replicas share phi, this is the paper's step. In pairs phi differs from replica to replica, and steps by
differences alone would let them drift apart; by weights, each element that is sent also pulls slow weights together.
"""

from __future__ import annotations

from torch import Tensor

from farandole.protocol.run.rules import Codec, OuterConfig
from farandole.training.outer.rule import Meeting, OuterRule, OwnVectors


class SparseLoCoConfig(OuterConfig, frozen=True, kw_only=True, tag_field="kind", tag="sparseloco"):
    """Settings of SparseLoCo, whose codec is always ``topk``."""

    codec: Codec = "topk"
    topk: int = 8
    """Of each 256 elements, how many are sent. 8 are 3 %, the paper sends 1 to 3 %."""
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
