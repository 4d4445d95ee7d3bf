"""What the outer step works on: a replica's slow weights, its outer rule's vectors, and its contributions.

All are flat fp32 vectors beside the fast weights. A round is `Contributor.freeze`, `Contributor.encode` and `step`;
the steps of replicas in a simulation (`farandole.training.baselines`) and of those in a node are these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from farandole.protocol.outer_rules import OuterConfig
from farandole.protocol.vectors import SLOW

from .codec import slices
from .contribution import Contribution, Contributor
from .copying import Copier
from .outer.rule import OwnVectors, rule_of

# In simulated honest runs with unequal speeds it came to 5.1 at most, and usually to 0.35 (`limit_momentum`).
MAX_MOMENTUM: Final = 10.0


class OuterState:
    """Of the fast weights ``fast`` (n,) fp32, which `step` moves as well. The slow weights begin as a copy of them."""

    def __init__(self, settings: OuterConfig, fast: Tensor, copier: Copier) -> None:
        self.settings = settings
        self.slow = fast.clone()
        self.vectors = {name: fast.new_zeros(len(fast)) for name in settings.vectors}
        self._fast = fast
        self._rule = rule_of(settings)
        self.contributor = Contributor(settings, self._rule, fast, self.slow, copier)
        """Makes the contributions, of both weights as they are then."""

    def step(
        self, made: Contribution, contributions: Sequence[Tensor], weights: Sequence[float], *, is_late: bool
    ) -> None:
        """The outer step of one fragment, whose own contribution is ``made``; slice by slice, in place.

        ``contributions``, (n,) each, and ``weights`` are those of `OuterRule.step`; without any, the replica is alone.
        ``is_late``: inner steps were taken since the contribution, and their progress is kept.
        """
        whole = OwnVectors(self.slow, self.vectors).piece(made.part)
        fast = self._fast[made.part]
        if is_alone := not contributions:
            contributions, weights = [self._undistorted(made, whole.slow)], [1.0]
        self._rule.begin(whole, contributions, weights)
        for piece in slices(len(fast)):
            own = whole.piece(piece)
            self._rule.step(own, [contribution[piece] for contribution in contributions], weights)
            if is_late:
                fast[piece] += own.slow - made.theta[piece]
            else:
                fast[piece] = own.slow
        if not is_alone:
            self.contributor.passed_on(made)

    def limit_momentum(self, part: slice, movement: float) -> bool:
        """Clip what is carried over from earlier rounds; returns whether it was too much.

        ``movement``: how far this replica's inner steps usually move the part in a round, a norm. Momentum that honest
        rounds have made is at most `MAX_MOMENTUM` times what such movements add up to (momentum clipping: CO2,
        arXiv 2401.16265, section 3.3, with another yardstick). A checkpoint of a stranger's may have any, and so may
        a round in which the loss went up steeply.
        """
        limit, has_clipped = MAX_MOMENTUM * self.settings.momentum_gain * movement, False
        for momentum in (vector[part] for name, vector in self.vectors.items() if name == "momentum"):
            norm = float(torch.linalg.vector_norm(momentum))
            if not norm <= limit:
                has_clipped = True
                momentum.mul_(limit / norm) if norm < math.inf else momentum.zero_()
        return has_clipped

    def distance_to_slow(self, made: Contribution) -> float:
        """How far what was sent is from what would have been sent without any inner step: a norm."""
        slow, square = self.slow[made.part], 0.0
        for piece in slices(len(slow)):
            moved = made.sent[piece] - self._rule.contribution(slow[piece], slow[piece])
            square += float(moved @ moved)
        return math.sqrt(square)

    def weights_as_sent(self, made: Contribution) -> Tensor | None:
        """The fast weights as a partner decodes them (n,); None where the codec changes nothing, or what is sent is
        something else.
        """
        is_exact = made.sent.data_ptr() == made.theta.data_ptr()
        return None if is_exact or not self._rule.sends_fast_weights else made.sent

    def _undistorted(self, made: Contribution, slow: Tensor) -> Tensor:
        """One's own contribution without its codec's errors (n,), in the memory of what was sent."""
        if self._rule.sends_fast_weights:
            return made.theta
        for piece in slices(len(slow)):
            made.sent[piece] = self._rule.contribution(made.theta[piece], slow[piece])
        return made.sent

    def state(self) -> dict[str, Tensor]:
        """What every checkpoint of the run has: flat vectors (n,), by name."""
        return {SLOW: self.slow, **self.vectors}
