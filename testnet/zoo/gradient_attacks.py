"""Attacks that descend on a loss: of members with the project's sources, the run's text and a model to compute with.

Each begins at its victim's weights and takes a few gradient steps, within a few times the distance of two honest
members. What the guard would say to the result, such an attacker can work out with a guard of its own; in simulation it
asks its victim's (`Insight.taken`), which is more than it could know.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import Final

import torch
from torch import Tensor

from farandole.training.data.batches import Batch
from farandole.training.engine.learner import Learner

# Gradient steps of an attack, and their length as a share of the distance that it may go.
STEPS: Final = 5
STEP_SHARE: Final = 1 / 3
# In distances of two honest members: how far an attack goes that asks for no verdict, and what one tries that does.
RADIUS: Final = 1.2
RADII: Final = (4.0, 2.0, 1.0, 0.5, 0.25, 0.12, 0.06)
BISECTIONS: Final = 3
# The batches that all members once judged on, and those that they are to get worse on, by their numbers.
EXAM: Final = range(4)
UNSEEN: Final = range(1_000, 1_000_000)


@dataclass(slots=True)
class Common:
    """What the hostile members of a run tell each other."""

    means: deque[Tensor] = field(default_factory=lambda: deque(maxlen=2))
    """The means (n,) of the honest members' contributions, in the round before and in this one."""
    way: Tensor | None = None
    """Where one of them went last, (n,)."""


@dataclass(frozen=True, slots=True)
class Insight:
    """What an attacker can compute besides weights."""

    learner: Learner
    """The attacker's own."""
    taken: Callable[[Tensor], Tensor]
    """What the victim would have after it has judged these values (n,): its mean, or its own weights."""
    generator: torch.Generator
    common: Common = field(default_factory=Common)

    def exam(self) -> list[Batch]:
        """Return the batches (B, T + 1) that every member once judged on."""
        return [self.learner.sampler.held_out_batch(index) for index in EXAM]

    def unseen(self, number: int = 1) -> list[Batch]:
        """Return other held-out batches (B, T + 1)."""
        drawn = torch.randint(UNSEEN.start, UNSEEN.stop, (number,), generator=self.generator)
        return [self.learner.sampler.held_out_batch(index) for index in drawn.tolist()]

    def loss(self, weights: Tensor, batches: Sequence[Batch]) -> float:
        """Return the loss of weights (n,) on some batches."""
        with self.learner.round_end.weights.replaced(slice(0, len(weights)), weights.clone()), torch.no_grad():
            return sum(float(self._loss(batch)) for batch in batches) / len(batches)

    def gradient(self, weights: Tensor, batches: Sequence[Batch]) -> Tensor:
        """Return the gradient (n,) of the loss at weights (n,)."""
        replica = self.learner.replica
        with self.learner.round_end.weights.replaced(slice(0, len(weights)), weights.clone()):
            replica.gradient.zero_()
            with torch.enable_grad():
                for batch in batches:
                    (self._loss(batch) / len(batches)).backward()
            gradient = replica.gradient.clone()
            replica.gradient.zero_()
        return gradient

    def _loss(self, batch: Batch) -> Tensor:
        return self.learner.loss(self.learner.replica.module, torch.as_tensor(batch))


def distance(honest: Sequence[Tensor]) -> float:
    """Return the usual distance of two honest members."""
    return median(float((one - other).norm()) for one, other in combinations(honest, 2))


def climb(insight: Insight, start: Tensor, limit: float, greed: float, *, pleases: bool) -> Tensor:
    """Return the way (n,) from ``start`` to where unseen text is worse; ``pleases``: and the exam's batches better.

    ``greed``: the weight of the unseen text's loss. The way is at most ``limit`` long.
    """
    way = torch.zeros_like(start)
    for _ in range(STEPS):
        slope = -greed * insight.gradient(start + way, insight.unseen(2))
        if pleases:
            slope += insight.gradient(start + way, insight.exam())
        way -= STEP_SHARE * limit * slope / slope.norm()
        way *= min(1.0, limit / float(way.norm()))
    return way


def most_harmful(insight: Insight, start: Tensor, way: Tensor) -> Tensor:
    """Return weights (n,) that a multiple of the way leads to: the ones that cost the victim most, as it judges.

    It tries some, and then bisects between the best of them and the next larger, which the victim takes less of.
    """
    batches = insight.unseen(4)

    def harm(factor: float) -> float:
        return insight.loss(insight.taken(start + factor * way), batches)

    harms = {factor: harm(factor) for factor in RADII}
    best = max(harms, key=harms.__getitem__)
    beyond = min((factor for factor in RADII if factor > best), default=2 * best)
    for _ in range(BISECTIONS):
        between = (best + beyond) / 2
        harms[between] = harm(between)
        best, beyond = (between, beyond) if harms[between] >= harms[best] else (best, between)
    return start + best * way
