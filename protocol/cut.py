"""Where a model is cut into stages, and how large they are. Imports no torch: the mesh process reads this.

The cut follows from the run's settings alone, so that every node cuts alike: where they do not say it, from what is
counted. Whoever makes a run can measure instead (`farandole.training.measure`), and then they say it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from .errors import ManifestError
from .manifest import ModelConfig
from .parts import parts_of

# Parameters of a stage, over an even share of them, where it is cut by time. Parts that are quickly computed can be
# large (an embedding), and parameters are what a node must have memory for, fetch, and exchange each round: with half
# as many again, a card that holds an even share with some room still does.
MAX_PARAMETER_SHARE = 1.5


@dataclass(frozen=True, slots=True)
class Costs:
    """What a model's parts cost, in any one unit: a layer each, and both ends together."""

    layers: tuple[float, ...]
    ends: float

    def of(self, stages: Sequence[range]) -> tuple[float, ...]:
        """What each stage of a cut costs."""
        return tuple(
            sum(self.layers[layer] for layer in layers) + (self.ends if stage == 0 else 0.0)
            for stage, layers in enumerate(stages)
        )


@dataclass(frozen=True, slots=True)
class Limit:
    """The most of a further cost that a stage may have."""

    costs: Costs
    most: float


def transformer_costs(model: ModelConfig) -> Costs:
    """Parameters, and for attention's scores as many as would multiply as often.

    A parameter is a multiplication a token; an embedding that is not the head as well is only looked up, but it is
    memory, stepped, and exchanged like the others.
    """
    parts = parts_of(model)
    layer = parts.layer + model.context * parts.attention_width
    return Costs((float(layer),) * model.num_layers, float(parts.ends))


def parameter_costs(model: ModelConfig) -> Costs:
    """Parameters alone."""
    parts = parts_of(model)
    return Costs((float(parts.layer),) * model.num_layers, float(parts.ends))


def cut(costs: Costs, num_stages: int, limit: Limit | None = None) -> tuple[range, ...]:
    """The layers of each stage, such that the dearest stage is as cheap as can be; where that leaves a choice, earlier
    stages get less. Every stage but the first has a layer.

    Raises `ManifestError` if there are too few of them, or no cut keeps to the limit.
    """
    num_layers = len(costs.layers)
    if not 1 <= num_stages <= num_layers + 1:
        raise ManifestError(f"{num_layers} layers and both ends cannot be cut into {num_stages} stages")
    sums = [0.0, *accumulate(costs.layers)]
    bounds = sorted(
        {sums[end] - sums[first] for end in range(1, num_layers + 1) for first in range(end)}
        | {costs.ends + so_far for so_far in sums}
    )

    def begins_within(bound: float) -> list[int] | None:
        return _begins([Limit(costs, bound), *([limit] if limit else [])], num_stages)

    least = bisect_left(bounds, True, key=lambda bound: begins_within(bound) is not None)
    begins = begins_within(bounds[least]) if least < len(bounds) else None
    if begins is None:
        raise ManifestError(f"{num_layers} layers and both ends cannot be cut into {num_stages} stages so small")
    return tuple(range(first, end) for first, end in pairwise((*begins, num_layers)))


def _begins(limits: Sequence[Limit], num_stages: int) -> list[int] | None:
    """Where each stage begins if none is beyond any limit, filled from the last one; None if that cannot be."""
    sums = [[0.0, *accumulate(limit.costs.layers)] for limit in limits]
    mosts = [limit.most * (1 + 1e-9) for limit in limits]  # sums of layers are rounded
    begins = [len(limits[0].costs.layers)]
    for stage in range(num_stages - 1, 0, -1):
        end = begins[-1]
        first = max(bisect_left(so_far, so_far[end] - most) for so_far, most in zip(sums, mosts, strict=True))
        first = max(first, stage - 1)
        if first >= end:
            return None
        begins.append(first)
    for limit, so_far, most in zip(limits, sums, mosts, strict=True):
        if limit.costs.ends + so_far[begins[-1]] > most:
            return None
    return [0, *begins[:0:-1]]


def cut_by_time(model: ModelConfig, seconds: Costs) -> tuple[range, ...]:
    """The layers of each stage, such that the slowest is as fast as can be.

    No stage has more than `MAX_PARAMETER_SHARE` of an even share of the parameters, or, where that cannot be, more than
    the largest stage has if the parameters alone are cut.
    """
    parameters = parameter_costs(model)
    even = (sum(parameters.layers) + parameters.ends) / model.num_stages
    least = max(parameters.of(cut(parameters, model.num_stages)))
    most = max(MAX_PARAMETER_SHARE * even, least)
    return cut(seconds, model.num_stages, Limit(parameters, most))


def layers_of(model: ModelConfig) -> tuple[range, ...]:
    """The layers of each stage of a run's model: as its settings say, else cut by cost.

    Raises `ManifestError` if what they say does not add up.
    """
    if not model.stage_layers:
        return cut(transformer_costs(model), model.num_stages)
    return explicit_cut(model.stage_layers, model.num_layers, model.num_stages)


def explicit_cut(stage_layers: Sequence[int], num_layers: int, num_stages: int) -> tuple[range, ...]:
    """As many layers a stage as ``stage_layers`` says; raises `ManifestError` if they are not all the layers."""
    if len(stage_layers) != num_stages or sum(stage_layers) != num_layers:
        raise ManifestError(f"layers {list(stage_layers)} do not make {num_layers} in {num_stages} stages")
    return tuple(range(first, end) for first, end in pairwise(accumulate(stage_layers, initial=0)))


def stage_parameters(model: ModelConfig, stage: int) -> int:
    """How many numbers a stage learns: its layers', and the model's ends' if it is the first."""
    parts = parts_of(model)
    return len(layers_of(model)[stage]) * parts.layer + (parts.ends if stage == 0 else 0)
