"""The parameters of a whole model by name and shape, and the stage of each, without building it. Imports no torch.

The parameters are in the order in which the modules define them (`farandole.training.model.model`, `hf`, `own_model`),
so a file written by these shapes has the same layout as one that a module of the whole model saves.
"""

from __future__ import annotations

import re

from ..wire.safetensors import Shape
from .cut import layers_of
from .families.base import repeated
from .manifest import ModelConfig
from .own_model import OwnModel

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
