"""An attacker that has read the code, and searches for what costs the honest most.

Its contribution is its victim's weights and a sum of ways from there, each times a number (`Policy`): how the honest
have just moved, how the victim differs from the others, up the loss, the way that the hostile went last, and its own
weights. It asks a guard in its victim's state what would be averaged of it, and sends the multiple that moves the
victim furthest (`Policy.contribution`). The numbers are found by playing whole runs, by the cross-entropy method
(Rubinstein 1999), on seeds that no figure is from (`search`). So it gets better at whatever the guard does not see,
such as steps that cost nothing now and much at the end of a run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from statistics import fmean
from typing import Final

import torch
from torch import Tensor

from .gradient_attacks import climb, distance
from .member_attacks import AttackView

# Multiples of its way that an attacker asks the guard about.
MULTIPLES: Final = (2.0, 1.4, 1.0, 0.7, 0.5, 0.25)
# Policies of a generation; of all before, the best ELITE are the parents of the next.
GENERATION: Final = 8
ELITE: Final = 3
# How far a child's number is from its parents' mean at first, by what it shrinks, and how many of them change.
SPREAD, SHRINK, CHANGED = 0.6, 0.8, 0.5
# Below this, a way is zero.
LEAST: Final = 1e-30


@dataclass(frozen=True, slots=True)
class Policy:
    """The numbers of ways, for all victims and rounds of a run."""

    ahead: float = 0.0
    """On from where the honest were in the round before; negative: back there."""
    apart: float = 0.0
    """Away from the mean of the honest."""
    uphill: float = 0.0
    """Up the loss on text of the attacker's own, in distances of two honest members."""
    again: float = 0.0
    """Along the way that the hostile members went last, in distances of two honest members."""
    honest: float = 0.0
    """To the weights that it would send if it were honest."""

    def contribution(self, view: AttackView) -> Tensor:
        """Return the values (n,) to send."""
        insight, victim = view.insight, view.victim
        if insight is None or len(view.honest) < 2:
            return victim
        common, limit = insight.common, distance(view.honest)
        mean = torch.stack(list(view.honest)).mean(0)
        if not common.means or not torch.equal(common.means[-1], mean):
            common.means.append(mean)
        way = self.apart * (victim - mean) + self.honest * (view.own - victim)
        if len(common.means) > 1:
            way += self.ahead * (victim - common.means[0])
        if self.uphill > 0.0:
            way += climb(insight, victim, self.uphill * limit, 1.0, pleases=False)
        if common.way is not None:
            way += self.again * limit * common.way / max(float(common.way.norm()), LEAST)
        common.way = way

        def moved(multiple: float) -> float:
            return float((insight.taken(victim + multiple * way) - victim).norm())

        return victim + max(MULTIPLES, key=moved) * way


# What an attacker tries first: never to train, to undo the round, to overshoot, to part the honest, to climb.
FIRST: Final = (
    Policy(),
    Policy(ahead=-1.0),
    Policy(ahead=-2.0),
    Policy(ahead=1.0),
    Policy(apart=1.0),
    Policy(ahead=1.0, apart=0.5),
    Policy(uphill=1.0),
    Policy(uphill=0.5, again=0.5),
)


def search(
    play: Callable[[Sequence[Policy]], Sequence[float]], generations: int, rng: random.Random
) -> tuple[Policy, float]:
    """Return the policy that costs most, and its cost.

    ``play`` returns the costs of some policies.
    """
    population: Sequence[Policy] = FIRST
    found: list[tuple[float, Policy]] = []
    spread = SPREAD
    for _ in range(generations):
        found += zip(play(population), population, strict=True)
        found = sorted(found, key=lambda each: each[0], reverse=True)[:ELITE]
        population = [_child([policy for _, policy in found], spread, rng) for _ in range(GENERATION)]
        spread *= SHRINK
    cost, best = found[0]
    return best, cost


def _child(parents: Sequence[Policy], spread: float, rng: random.Random) -> Policy:
    both = zip(astuple(rng.choice(parents)), astuple(rng.choice(parents)), strict=True)
    return Policy(*(fmean(pair) + (rng.random() < CHANGED) * rng.gauss(0.0, spread) for pair in both))
