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

    v_r = phi + beta residual_r + (theta_r - phi)        an element that is not sent counts as phi
    residual_r <- v_r - (v_r as sent)
    phi <- phi + learning_rate (mean_r(v_r as sent) - phi)

While all replicas share phi, as in a gathered group, this is the paper's step. In pairs phi differs from replica to
replica, and steps by differences alone would let them drift apart. By weights, each element that is sent also pulls
the partners' slow weights together there; of an element that is not sent, a receiver takes its own phi.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from farandole.protocol.run.rules import Codec, OuterConfig
from farandole.training.outer.codec import form_of
from farandole.training.outer.rule import weighted_mean


class SparseLoCoConfig(OuterConfig, frozen=True, kw_only=True, tag_field="kind", tag="sparseloco"):
    """Settings of SparseLoCo, whose codec is always ``topk``."""

    codec: Codec = "topk"
    topk: int = 8
    """Of each 256 elements, how many are sent. 8 are 3 %, the paper sends 1 to 3 %."""
    learning_rate: float = 1.0
    beta: float = 0.95
    """Share of what was not sent that a round keeps."""


class SparseLoCo:
    """The outer state of one replica, whose fast weights are ``fast`` (n,)."""

    def __init__(self, settings: SparseLoCoConfig, fast: Tensor) -> None:
        self.fast, self.slow, self.residual = fast, fast.clone(), torch.zeros_like(fast)
        self._settings = settings
        self._form = form_of(settings.codec, settings.topk)
        self._exact = self._theta = fast
        self._encoded = torch.empty(self._form.size(len(fast)), dtype=torch.uint8)

    def contribute(self, part: slice) -> None:
        """Encode the elements of v that are furthest from the slow weights; ``part`` is all of them."""
        self._theta = self.fast.clone()
        self._exact = self._settings.beta * self.residual + self._theta
        self._form.encode(self._exact, self._encoded, self.slow)

    @property
    def filling(self) -> Tensor:
        """What this replica takes for the elements that it does not receive (n,)."""
        return self.slow

    def decoded(self, filling: Tensor) -> Tensor:
        """Return the contribution as a replica with this ``filling`` decodes it (n,)."""
        values = filling.clone()
        self._form.decode(self._encoded, values)
        return values

    def step(self, received: Sequence[Tensor], shares: Sequence[float], *, is_late: bool) -> None:
        """Take the outer step by the formulas above; alone, without any contribution, everything counts as sent."""
        rate = self._settings.learning_rate
        self.residual = self._exact - (self.decoded(self.slow) if received else self._exact)
        mean = weighted_mean(received, shares) if received else self._exact
        self.slow.mul_(1.0 - rate).add_(rate * mean)
        if is_late:
            self.fast += self.slow - self._theta
        else:
            self.fast.copy_(self.slow)
