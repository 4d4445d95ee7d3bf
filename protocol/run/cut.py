"""The cut of a model into stages, and the stages' sizes. Imports no torch: the mesh process reads this.

The cut follows from the run's settings alone, so that every node cuts alike. If the settings do not give it, it is
computed from counted costs. The creator of a run can measure instead (`farandole.training.engine.measure`) and put the
result in the settings.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ..wire.errors import ManifestError
from ..wire.safetensors import Shape
from .families.base import repeated
from .manifest import ModelConfig
from .own_model import OwnModel
from .presets import parts_of

# Most parameters of a stage, as a multiple of an even share, if the model is cut by time. Parts that are computed fast
# can be large (an embedding), and parameters are what a node must have memory for, fetch, and exchange each round: with
# half as many again, a card that holds an even share with some room still suffices.
MAX_PARAMETER_SHARE = 1.5


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of a model's parts, in any one unit: each layer's, and the one of both ends together."""

    layers: tuple[float, ...]
    ends: float

    def of(self, stages: Sequence[range]) -> tuple[float, ...]:
        """Return the cost of each stage of a cut."""
        return tuple(
            sum(self.layers[layer] for layer in layers) + (self.ends if stage == 0 else 0.0)
            for stage, layers in enumerate(stages)
        )


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that a stage may have of another cost."""

    costs: Costs
    most: float


def transformer_costs(model: ModelConfig) -> Costs:
    """Return costs in parameters, with attention's scores counted as the parameters that would multiply as often.

    A parameter is one multiplication per token. An embedding that is not also the head is only looked up, but it takes
    memory, and is stepped and exchanged like the others.
    """
    parts = parts_of(model)
    layer = parts.layer + model.context * parts.attention_width
    return Costs((float(layer),) * model.num_layers, float(parts.ends))


def parameter_costs(model: ModelConfig) -> Costs:
    """Return costs in parameters alone."""
    parts = parts_of(model)
    return Costs((float(parts.layer),) * model.num_layers, float(parts.ends))


def cut(costs: Costs, num_stages: int, limit: Limit | None = None) -> tuple[range, ...]:
    """Return the layers of each stage, such that the most expensive stage is as cheap as possible; if several cuts are
    equal, earlier stages get less. Every stage but the first has a layer.

    Raises `ManifestError` if there are too few layers, or if no cut is within the limit.
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
    """Return where each stage begins, filled from the last one, or None if that is not possible within the limits."""
    sums = [[0.0, *accumulate(limit.costs.layers)] for limit in limits]
    mosts = [limit.most * (1 + 1e-9) for limit in limits]  # for rounding in the sums of layers
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
    """Return the layers of each stage, such that the slowest stage is as fast as possible.

    No stage has more than `MAX_PARAMETER_SHARE` of an even share of the parameters. If that is not possible, none has
    more than the largest stage of a cut by parameters alone.
    """
    parameters = parameter_costs(model)
    even = (sum(parameters.layers) + parameters.ends) / model.num_stages
    least = max(parameters.of(cut(parameters, model.num_stages)))
    most = max(MAX_PARAMETER_SHARE * even, least)
    return cut(seconds, model.num_stages, Limit(parameters, most))


def layers_of(model: ModelConfig) -> tuple[range, ...]:
    """Return the layers of each stage of a run's model: from its settings if they give them, otherwise cut by cost.

    Raises `ManifestError` if the settings do not add up.
    """
    if not model.stage_layers:
        return cut(transformer_costs(model), model.num_stages)
    return explicit_cut(model.stage_layers, model.num_layers, model.num_stages)


def explicit_cut(stage_layers: Sequence[int], num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Cut as ``stage_layers`` says, layers per stage; raise `ManifestError` if they do not add up to all layers."""
    if len(stage_layers) != num_stages or sum(stage_layers) != num_layers:
        raise ManifestError(f"layers {list(stage_layers)} do not make {num_layers} in {num_stages} stages")
    return tuple(range(first, end) for first, end in pairwise(accumulate(stage_layers, initial=0)))


def stage_parameters(model: ModelConfig, stage: int) -> int:
    """Return the number of parameters of a stage: its layers', and the model's ends' if it is the first."""
    parts = parts_of(model)
    return len(layers_of(model)[stage]) * parts.layer + (parts.ends if stage == 0 else 0)


# The parameters of a whole model by name and shape, and the stage of each, without building it. Imports no torch.
#
# The parameters are in the order in which the modules define them (`farandole.training.model.model`, `hf`,
# `own_model`), so a file written by these shapes has the same layout as one that a module of the whole model saves.

# Layer names of each kind of model; every other parameter belongs to the model's ends.
_LAYER = re.compile(r"(?:model\.|transformer\.)?(?:layers|h)\.(\d+)\.")


def shapes_of(model: ModelConfig) -> dict[str, Shape]:
    """Return each parameter's shape by its name, of all stages together."""
    if model.external is not None:
        return dict(model.external.parameters)
    if model.own is not None:
        return _own(model.own, model.num_layers)
    if model.hf is not None:
        hf = model.hf
        return {**repeated(hf.layers_name, model.num_layers, hf.layer_shapes), **hf.end_shapes}
    width, hidden = model.width, model.hidden
    layer = {
        "attention_norm.weight": (width,),
        "attention.qkv.weight": (3 * width, width),
        "attention.out.weight": (width, width),
        "mlp_norm.weight": (width,),
        "mlp.gate_up.weight": (2 * hidden, width),
        "mlp.down.weight": (width, hidden),
    }
    layers = repeated("layers", model.num_layers, layer)
    return {"embedding.weight": (model.vocabulary, width), **layers, "norm.weight": (width,)}


def stage_of(model: ModelConfig, name: str) -> int:
    """Return the stage that holds a parameter."""
    if model.num_stages == 1:  # a user's own module may call anything "layers.9"
        return 0
    match = _LAYER.match(name)
    if match is None:
        return 0
    layer = int(match[1])
    return next(stage for stage, layers in enumerate(layers_of(model)) if layer in layers)


def names_of_stage(model: ModelConfig, stage: int) -> frozenset[str]:
    """Return the names of the parameters that a stage holds."""
    return frozenset(name for name in shapes_of(model) if stage_of(model, name) == stage)


def _own(own: OwnModel, num_layers: int) -> dict[str, Shape]:
    if not own.has_sections:
        return dict(own.ends)
    ends = {f"ends.{name}": shape for name, shape in own.ends.items()}
    return {**ends, **repeated("layers", num_layers, own.layer)}
