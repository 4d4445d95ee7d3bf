"""Count the parameters of a model's parts without building it. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .manifest import ModelConfig


@dataclass(frozen=True, slots=True)
class Parts:
    """Parameter counts of one layer and of both ends: the embedding, the last norm, and a head that is not tied."""

    layer: int
    ends: int
    attention_width: int
    """Width of all heads together; 0 for a user's own module, where it is not known."""


def parts_of(model: ModelConfig) -> Parts:
    """Return the parameter counts of a model's parts."""
    if model.external is not None:
        return Parts(0, model.external.num_parameters, 0)
    if model.own is not None:
        return Parts(_count(model.own.layer), _count(model.own.ends), 0)
    if model.hf is not None:
        return Parts(_count(model.hf.layer_shapes), _count(model.hf.end_shapes), model.hf.attention_width)
    width = model.width
    attention = 4 * width * width  # query, key, value, output
    mlp = 3 * width * model.hidden  # gate, up, down
    norms = 2 * width
    return Parts(attention + mlp + norms, model.vocabulary * width + width, width)


def _count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes.values()))
