"""SparseLoCo's outer step (arXiv 2508.15706): few elements of the outer gradient, and memory of the rest.

With the paper's names, replica r sends the largest elements of what it has not sent yet, quantized, and keeps the rest:

    Delta_r = phi - theta_r
    e_r    <- beta e_r + Delta_r
    s_r     = Q(Top-k(e_r))
    e_r    <- e_r - s_r
    phi    <- phi - learning_rate mean_r(s_r)

The memory e_r takes the place of the outer momentum: what is not sent now pulls in the same direction in the next
rounds. Source: the abstract of the paper, and its algorithm as a catalogue of optimizers gives it
(github.com/junaidaliop/zij, canon/math/sparseloco.md); no equation is cited, since the paper's text was not at hand.

Top-k and Q are the codec ``topk`` (of each 256 elements k, in 8 bits; the paper has 2 bits and other blocks). Here all
signs are turned, the ``residual`` is -e, and what is sent is not s but the weights that it leads to:

    v_r = phi + beta residual_r + (theta_r - phi)        the **contribution**; an element that is not sent counts as phi
    residual_r <- v_r - (v_r as sent)
    phi <- phi + learning_rate (mean_r(v_r as sent) - phi)

While all replicas share phi, as in a gathered group, this is the paper's step. In pairs phi differs from replica to
replica, and steps by differences alone would let them drift apart. By weights, each element that is sent also pulls
the partners' slow weights together there; of an element that is not sent, a receiver takes its own phi.

With other codecs everything is sent, and the residual is what the codec rounded away.
"""

from __future__ import annotations

from torch import Tensor

from farandole.protocol.run.outer_rules import SparseLoCoConfig

from .rule import Meeting, OuterRule, OwnVectors


class SparseLoCo(OuterRule):
    """SparseLoCo; a replica's own contribution counts as it was sent, since the residual keeps the rest."""

    keeps_own_exact = False

    def __init__(self, settings: SparseLoCoConfig) -> None:
        self._settings = settings

    def contribution(self, own: OwnVectors) -> Tensor:
        """V = theta + beta residual: the slow weights, moved by all that is not sent yet."""
        return (self._settings.beta * own.vectors["residual"]).add_(own.fast)

    def step(self, own: OwnVectors, meeting: Meeting) -> None:
        """The formulas above."""
        rate = self._settings.learning_rate
        own.vectors["residual"].copy_(self.contribution(own).sub_(meeting.own))
        own.slow.mul_(1.0 - rate).add_(rate * meeting.mean())


RULE = SparseLoCo
