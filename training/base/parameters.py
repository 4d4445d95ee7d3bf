"""A model's parameters as one flat vector, in a fixed order that has a name: the layout.

The inner optimizer, the outer step, codecs and checkpoints all work on flat vectors; the model's parameters and
gradients are views into two of them, so nothing is gathered or scattered.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from farandole.protocol.wire.safetensors import Shape

from .errors import TrainingError


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of the flat vector: the parameters' shapes by name, in order, and the codec of exchanges."""

    shapes: Mapping[str, Shape]
    codec: str

    @property
    def num_elements(self) -> int:
        """Length of the flat vector."""
        return sum(map(math.prod, self.shapes.values()))

    @property
    def hash(self) -> bytes:
        """32 bytes; partners whose layouts differ cannot exchange anything."""
        lines = [f"{name} {'x'.join(map(str, shape))} fp32" for name, shape in self.shapes.items()]
        return hashlib.sha256("\n".join(["farandole/layout/1", self.codec, *lines]).encode()).digest()

    def fragments(self, count: int) -> list[slice]:
        """Return the ranges of ``count`` fragments of the flat vector; lengths differ by at most 1."""
        ends = [self.num_elements * index // count for index in range(count + 1)]
        return [slice(*place) for place in itertools.pairwise(ends)]

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters, by name, as views into ``flat`` (n,)."""
        return {name: flat[place].view(self.shapes[name]) for name, place in self.places().items()}

    def places(self) -> dict[str, slice]:
        """Return where each parameter lies in the flat vector, by name."""
        ends = itertools.accumulate(map(math.prod, self.shapes.values()), initial=0)
        return {name: slice(*place) for name, place in zip(self.shapes, itertools.pairwise(ends), strict=True)}


def layout_of(module: nn.Module, codec: str) -> Layout:
    """The layout of a module: its parameters in the order it defines them."""
    return Layout({name: tuple(parameter.shape) for name, parameter in module.named_parameters()}, codec)


@torch.no_grad()
def flatten_(module: nn.Module, layout: Layout) -> tuple[Tensor, Tensor]:
    """Move the parameters into one vector and their gradients into another; returns both, (n,) fp32."""
    weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    gradient = torch.zeros_like(weights)
    bind_(module, layout, weights, gradient)
    return weights, gradient


def bind_(module: nn.Module, layout: Layout, weights: Tensor, gradient: Tensor) -> None:
    """Make the module's parameters and gradients views into two vectors (n,), with the values these have."""
    weight_views, gradient_views = layout.views(weights), layout.views(gradient)
    for name, parameter in module.named_parameters():
        parameter.data = weight_views[name]
        parameter.grad = gradient_views[name]


def check_can_be_averaged(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise `TrainingError` if a parameter has no values, or ones that cannot be averaged, or a strange name."""
    for name, parameter in parameters.items():
        if not re.fullmatch(r"[\w.-]{1,200}", name, re.ASCII):
            raise TrainingError(f"parameter {name!r}: a run's names have letters of English, digits, _ . and -")
        if not parameter.is_floating_point():
            raise TrainingError(f"parameter {name} is {parameter.dtype}: only floating-point numbers are averaged")
        if parameter.is_meta:
            raise TrainingError(f"parameter {name} has no values: `model.to_empty(device=...)`, and initialise it")
