"""Judge whether a peer's weights are fit to continue from, by what a newcomer knows itself before its first round.

A newcomer has no history with any peer, so it can compare only with its own weights. The run's initial weights follow
from the manifest, so every node has them: weights that have learnt anything have a smaller loss on held-out text. A
node that was away has its last checkpoint as well. Both are liars' best cases: what passes is at most as bad as a fresh
start, or a little worse than what the node has, and costs the node alone some rounds.

Of a stage of a model no loss is known by itself: there the magnitudes alone are judged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from farandole.protocol.run.outer_rules import OPTIMIZER_VECTORS

from ..base.errors import DataError
from .engine import Engine

# Held-out batches: the same ones for all compared weights, so few are enough to distinguish noise from trained weights.
JUDGED_BATCHES: Final = 2
# By which share of the loss the weights may be worse than the initial ones, which the first steps of a run may be; and
# than this node's own, which know its own text best. Of a smaller loss than LEAST_LOSS, in nats a token, of this.
WORSE_THAN_INITIAL: Final = 0.05
WORSE_THAN_OWN: Final = 0.25
LEAST_LOSS: Final = 1.0
# How many times larger than the initial weights the weights, and the outer rule's vectors, may be: the weights of
# trained transformers are about ten times as large.
MAX_GROWTH: Final = 100.0


@dataclass(frozen=True, slots=True)
class Fitness:
    """The quality of an engine's weights."""

    loss: float | None
    """On held-out text, in nats a token; None: not known."""
    norm: float
    """The largest one of the vectors that a newcomer fetches."""


def fitness_of(engine: Engine) -> Fitness:
    """Measure an engine's weights."""
    squares: dict[str, float] = {}
    for name, tensor in engine.checkpoint.tensors().items():
        vector = name.partition("/")[0]
        if vector not in OPTIMIZER_VECTORS:
            squares[vector] = squares.get(vector, 0.0) + _square(tensor)
    return Fitness(_loss(engine), math.sqrt(max(squares.values(), default=0.0)))


def _square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


def _loss(engine: Engine) -> float | None:
    if engine.is_driven:  # it computes none by itself
        return None
    try:
        return engine.evaluate(JUDGED_BATCHES)
    except DataError:  # too little text is held out
        return None


def why_unfit(fetched: Fitness, initial: Fitness, own: Fitness | None) -> str:
    """Compare a peer's weights with the run's initial ones, and with this node's own; empty: they are fit."""
    if not fetched.norm <= MAX_GROWTH * initial.norm:
        return f"their norm is {fetched.norm:.3g}, that of the run's initial weights {initial.norm:.3g}"
    if fetched.loss is None:
        return ""
    known = [(initial, WORSE_THAN_INITIAL, "the run's initial weights have")]
    if own is not None:
        known.append((own, WORSE_THAN_OWN, "this node's own have"))
    for standing, share, whose in known:
        if standing.loss is None or not math.isfinite(standing.loss):
            continue
        if not fetched.loss <= standing.loss + share * max(standing.loss, LEAST_LOSS):
            return f"their loss on held-out text is {fetched.loss:.3f}, {whose} {standing.loss:.3f}"
    return "" if math.isfinite(fetched.loss) else f"their loss on held-out text is {fetched.loss}"
