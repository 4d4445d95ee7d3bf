"""Where a model is cut into stages, and how large they are. Imports no torch: the mesh process reads this.

The cut follows from the run's settings alone, so that every node cuts alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from .config import ModelConfig
from .errors import TrainingError
from .parts import parts_of


@dataclass(frozen=True, slots=True)
class Costs:
    """What a model's parts cost, in any one unit: a layer each, and both ends together."""

    layers: tuple[float, ...]
    ends: float


def transformer_costs(model: ModelConfig) -> Costs:
    """Parameters, and for attention's scores as many as would multiply as often.

    A parameter is a multiplication a token; an embedding that is not the head as well is only looked up, but it is
    memory, stepped, and exchanged like the others.
    """
    parts = parts_of(model)
    layer = parts.layer + model.context * parts.attention_width
    return Costs((float(layer),) * model.num_layers, float(parts.ends))


def cut(costs: Costs, num_stages: int) -> tuple[range, ...]:
    """The layers of each stage, such that the dearest stage is as cheap as can be; where that leaves a choice, earlier
    stages get less. Every stage but the first has a layer.

    Raises `TrainingError` if there are too few of them.
    """
    num_layers = len(costs.layers)
    if not 1 <= num_stages <= num_layers + 1:
        raise TrainingError(f"{num_layers} layers and both ends cannot be cut into {num_stages} stages")
    sums = [0.0, *accumulate(costs.layers)]
    bounds = sorted(
        {sums[end] - sums[first] for end in range(1, num_layers + 1) for first in range(end)}
        | {costs.ends + so_far for so_far in sums}
    )
    least = bisect_left(bounds, True, key=lambda bound: _begins(costs, sums, num_stages, bound) is not None)
    begins = _begins(costs, sums, num_stages, bounds[least])
    assert begins is not None, "all layers in one stage cost no more than the last bound"
    return tuple(range(first, end) for first, end in pairwise((*begins, num_layers)))


def _begins(costs: Costs, sums: Sequence[float], num_stages: int, bound: float) -> list[int] | None:
    """Where each stage begins if none costs more than ``bound``, filled from the last one; None if that cannot be."""
    begins = [len(costs.layers)]
    for stage in range(num_stages - 1, 0, -1):
        end = begins[-1]
        first = max(bisect_left(sums, sums[end] - bound * (1 + 1e-9)), stage - 1)
        if first >= end:
            return None
        begins.append(first)
    begins.append(0)
    return begins[:0:-1] if costs.ends + sums[begins[-2]] <= bound else None


def layers_of(model: ModelConfig) -> tuple[range, ...]:
    """The layers of each stage of a run's model: as its settings say, else cut by cost.

    Raises `TrainingError` if what they say does not add up.
    """
    if not model.stage_layers:
        return cut(transformer_costs(model), model.num_stages)
    return explicit_cut(model.stage_layers, model.num_layers, model.num_stages)


def explicit_cut(stage_layers: Sequence[int], num_layers: int, num_stages: int) -> tuple[range, ...]:
    """As many layers a stage as ``stage_layers`` says; raises `TrainingError` if they are not all the layers."""
    if len(stage_layers) != num_stages or sum(stage_layers) != num_layers:
        raise TrainingError(f"layers {list(stage_layers)} do not make {num_layers} in {num_stages} stages")
    return tuple(range(first, end) for first, end in pairwise(accumulate(stage_layers, initial=0)))


def stage_parameters(model: ModelConfig, stage: int) -> int:
    """How many numbers a stage learns: its layers', and the model's ends' if it is the first."""
    parts = parts_of(model)
    return len(layers_of(model)[stage]) * parts.layer + (parts.ends if stage == 0 else 0)
