"""Common parts of the families: bounds of their settings, and shapes of transformers' layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from ...wire.safetensors import Shape

NumLayers = Annotated[int, msgspec.Meta(ge=1, le=512)]
Width = Annotated[int, msgspec.Meta(ge=8, le=65_536)]
NumHeads = Annotated[int, msgspec.Meta(ge=1, le=1_024)]
Hidden = Annotated[int, msgspec.Meta(ge=8, le=262_144)]
Context = Annotated[int, msgspec.Meta(ge=8, le=1_048_576)]
Vocabulary = Annotated[int, msgspec.Meta(ge=2, le=2_000_000)]
HeadWidth = Annotated[int, msgspec.Meta(ge=2, le=1_024)]
# Numbers bounded at both ends are finite: msgspec rejects NaN where there is a bound.
Epsilon = Annotated[float, msgspec.Meta(gt=0, le=1)]
InitialStd = Annotated[float, msgspec.Meta(gt=0, le=1)]
Activation = Literal["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"]


def check_multiple(whole: str, size: int, part: str, count: int) -> None:
    """Raise `ValueError` unless ``size`` is a multiple of ``count``. ``whole`` and ``part`` name the settings."""
    if size % count:
        raise ValueError(f"{whole} ({size}) must be a multiple of {part} ({count})")


def linear(name: str, outputs: int, inputs: int, *, bias: bool) -> dict[str, Shape]:
    """Return the shapes of `torch.nn.Linear`."""
    return {f"{name}.weight": (outputs, inputs), **({f"{name}.bias": (outputs,)} if bias else {})}


def norm(name: str, width: int) -> dict[str, Shape]:
    """Return the shapes of `torch.nn.LayerNorm`."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def conv(name: str, inputs: int, outputs: int) -> dict[str, Shape]:
    """Return the shapes of `transformers.Conv1D`: a linear layer whose matrix is transposed."""
    return {f"{name}.weight": (inputs, outputs), f"{name}.bias": (outputs,)}


def head(*, is_tied: bool, vocabulary: int, width: int) -> dict[str, Shape]:
    """Return the shape of the head, unless it is the embedding."""
    return {} if is_tied else {"lm_head.weight": (vocabulary, width)}


def repeated(prefix: str, count: int, layer: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of ``count`` equal layers, as ``PREFIX.INDEX.NAME``."""
    return {f"{prefix}.{index}.{name}": shape for index in range(count) for name, shape in layer.items()}
