"""Models by name, their parameters, and their cut into stages. Imports no torch: the mesh process reads this.

The cut follows from the run's settings alone, so that every node cuts alike. If the settings do not give it, it is
computed from counted costs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType

from ..wire.errors import ManifestError
from ..wire.safetensors import Shape
from .families.base import repeated
from .manifest import ModelConfig
from .own_model import count, expanded

# A preset's name is its number of parameters with the byte-level vocabulary of 256 (within 5 %; a larger vocabulary
# adds width x vocabulary). Heads are 16 to 128 wide and the SwiGLU layer about 8/3 of the width, as in Llama (arXiv
# 2302.13971); only ``tiny``, the model of the measurements in BENCHMARKS.md, departs from that.


def _preset(num_layers: int, width: int, num_heads: int, hidden: int, context: int) -> ModelConfig:
    return ModelConfig(num_layers, width, num_heads, hidden, context, vocabulary=256)


PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "tiny": _preset(2, 32, 2, 128, 64),  # 41 k: tests and testnets
        "0.5M": _preset(4, 96, 4, 288, 128),
        "3M": _preset(6, 192, 6, 576, 256),
        "10M": _preset(8, 320, 5, 864, 512),
        "30M": _preset(9, 512, 8, 1_472, 1_024),
        "125M": _preset(18, 768, 12, 1_984, 1_024),
        "350M": _preset(27, 1_024, 16, 2_816, 1_024),
        "1B": _preset(20, 2_048, 16, 5_504, 2_048),
    }
)


def preset(name: str) -> ModelConfig:
    """Return the preset of this name; raise `ManifestError` with the known names if there is none."""
    if name not in PRESETS:
        raise ManifestError(f"model: no preset is called {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]


# The parameters of a whole model by name and shape, without building it. They are in the order in which the modules
# define them (`farandole.training.model.model`, `hf`, `own_model`), so a file written by these shapes has the same
# layout as one that a module of the whole model saves.

# Layer names of each kind of model; every other parameter belongs to the model's ends.
_LAYER = re.compile(r"(?:model\.|transformer\.)?(?:layers|h)\.(\d+)\.")


def shapes_of(model: ModelConfig) -> dict[str, Shape]:
    """Return each parameter's shape by its name, of all stages together."""
    if model.external is not None:
        return expanded(model.external.parameters)
    if model.own is not None:
        if not model.own.has_sections:
            return expanded(model.own.ends)
        ends = {f"ends.{name}": shape for name, shape in expanded(model.own.ends).items()}
        return {**ends, **repeated("layers", model.num_layers, model.own.layer)}
    if model.hf is not None:
        return {**repeated(model.hf.layers_name, model.num_layers, model.hf.layer_shapes), **model.hf.end_shapes}
    layers = repeated("layers", model.num_layers, _layer_shapes(model))
    return {"embedding.weight": (model.vocabulary, model.width), **layers, "norm.weight": (model.width,)}


def _layer_shapes(model: ModelConfig) -> dict[str, Shape]:
    width, hidden = model.width, model.hidden
    return {
        "attention_norm.weight": (width,),
        "attention.qkv.weight": (3 * width, width),
        "attention.out.weight": (width, width),
        "mlp_norm.weight": (width,),
        "mlp.gate_up.weight": (2 * hidden, width),
        "mlp.down.weight": (width, hidden),
    }


@dataclass(frozen=True, slots=True)
class Parts:
    """Parameter counts of one layer and of both ends: the embedding, the last norm, and a head that is not tied."""

    layer: int
    ends: int
    attention_width: int = 0
    """Width of all heads together; 0 for a user's own module, where it is not known."""


def parts_of(model: ModelConfig) -> Parts:
    """Return the parameter counts of a model's parts."""
    if model.external is not None:
        return Parts(0, model.external.num_parameters)
    if model.own is not None:
        return Parts(count(model.own.layer), count(model.own.ends))
    if model.hf is not None:
        return Parts(count(model.hf.layer_shapes), count(model.hf.end_shapes), model.hf.attention_width)
    return Parts(count(_layer_shapes(model)), model.vocabulary * model.width + model.width, model.width)


def num_parameters(model: ModelConfig) -> int:
    """Return the model's number of parameters, counted without building it."""
    parts = parts_of(model)
    return parts.ends + model.num_layers * parts.layer


# The cut into stages


def cut(layer: int, ends: int, num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Return the layers of each stage, such that the most expensive stage is as cheap as possible.

    ``layer``, ``ends``: the cost of each layer, and of both ends together, which the first stage has. If several cuts
    are equal, earlier stages get less. Every stage but the first has a layer. Raises `ManifestError` if there are too
    few layers.
    """
    sizes = range(num_layers + 1)
    for bound in sorted({n * layer for n in sizes} | {ends + n * layer for n in sizes}):
        begins = [num_layers]
        for stage in range(num_stages - 1, 0, -1):  # filled from the last one
            most = bound // layer if layer else num_layers
            begins.append(max(begins[-1] - most, stage - 1))
        is_filled = all(first < end for end, first in pairwise(begins))
        if num_stages and is_filled and ends + begins[-1] * layer <= bound:
            return tuple(range(first, end) for first, end in pairwise((0, *begins[:0:-1], num_layers)))
    raise ManifestError(f"{num_layers} layers and both ends cannot be cut into {num_stages} stages")


def layers_of(model: ModelConfig) -> tuple[range, ...]:
    """Return the layers of each stage of a run's model: from its settings if they give them, otherwise cut by cost."""
    if not model.stage_layers:
        # A parameter is one multiplication per token, and attention's scores are counted as the parameters that would
        # multiply as often. An embedding that is not also the head is only looked up, but it takes memory, and is
        # stepped and exchanged like the others.
        parts = parts_of(model)
        layer = parts.layer + model.context * parts.attention_width
        return cut(layer, parts.ends, model.num_layers, model.num_stages)
    return tuple(range(first, end) for first, end in pairwise(accumulate(model.stage_layers, initial=0)))


def stage_parameters(model: ModelConfig, stage: int) -> int:
    """Return the number of parameters of a stage: its layers', and the model's ends' if it is the first."""
    parts = parts_of(model)
    return len(layers_of(model)[stage]) * parts.layer + (parts.ends if stage == 0 else 0)


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
