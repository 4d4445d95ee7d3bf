"""Models by name, and how many parameters a model has. Imports no torch: the command line reads this.

A preset's name is its number of parameters with the byte-level vocabulary of 256 (within 5 %; a larger vocabulary adds
width x vocabulary). Heads are 16 to 128 wide and the SwiGLU layer about 8/3 of the width, as in Llama (arXiv
2302.13971); only ``tiny``, the model of the measurements in BENCHMARKS.md, departs from that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..wire.errors import ManifestError
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


def num_parameters(model: ModelConfig) -> int:
    """Return the model's number of parameters, counted without building it."""
    parts = parts_of(model)
    return parts.ends + model.num_layers * parts.layer
