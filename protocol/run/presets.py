"""Models by name, and how many parameters a model has. Imports no torch: the command line reads this.

A preset's name is its number of parameters with the byte-level vocabulary of 256 (within 5 %; a larger vocabulary adds
width x vocabulary). Heads are 16 to 128 wide and the SwiGLU layer about 8/3 of the width, as in Llama (arXiv
2302.13971); only ``tiny``, the model of the measurements in BENCHMARKS.md, departs from that.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..wire.errors import ManifestError
from .manifest import ModelConfig
from .parts import parts_of


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
