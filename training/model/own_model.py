"""One's own module, made by a function that the node's owner has installed and allowed.

The function is given a dict, the run's ``config`` with ``context`` and ``vocabulary``, and returns one of two things:

- an `nn.Module` that makes logits (B, T, V) of tokens (B, T). It trains whole.
- `SectionedModel`, an object that makes the model's parts one by one. It trains whole, and can be cut into stages too.

Each part is made while PyTorch draws from a generator keyed with the run's seed and the part's name, so that every node
makes the same ones, and a stage the same as the whole. The run's creator tries the model once beforehand
(`farandole.training.model.own_trial`); every node compares the parameters with the manifest's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor, nn

from farandole.protocol.run.manifest import ModelConfig
from farandole.protocol.run.own_model import OwnModel

from ..base.errors import TrainingError
from .model import cross_entropy
from .own_function import Maker, load_function

Shapes = dict[str, tuple[int, ...]]
_T = TypeVar("_T")


class Ends(Protocol):
    """Both ends of a model in sections, one `nn.Module`; they may share weights."""

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, T, C) for tokens (B, T)."""

    def logits(self, x: Tensor) -> Tensor:
        """(B, T, V) for the last layer's (B, T, C)."""


@runtime_checkable
class SectionedModel(Protocol):
    """A maker of a model's parts. All layers are of one kind: their parameters have the same names and shapes."""

    width: int
    """C, of what goes from layer to layer."""
    num_layers: int

    def ends(self) -> nn.Module:
        """A new `Ends`."""

    def layer(self, index: int) -> nn.Module:
        """A new layer ``index``, from 0: (B, T, C) for (B, T, C), and nothing else."""


class OwnStage(nn.Module):
    """A model in sections, or a stage of it: some of its layers, and in the first stage both ends."""

    def __init__(self, sections: SectionedModel, seed: int, layers: range, *, has_ends: bool) -> None:
        super().__init__()
        if has_ends:
            self.ends = make_part(sections.ends, seed, "ends")
        self.layers = nn.ModuleDict({str(index): make_layer(sections, index, seed) for index in layers})

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V) for tokens (B, T), of the whole model."""
        return self.logits(self.advance(self.embed(tokens)))

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, T, C) for tokens (B, T)."""
        return cast("Ends", self.ends).embed(tokens)

    def advance(self, x: Tensor) -> Tensor:
        """(B, T, C) for (B, T, C), through this module's layers."""
        for layer in self.layers.values():
            x = layer(x)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """(B, T, V) for the last layer's (B, T, C)."""
        return cast("Ends", self.ends).logits(x)

    def loss(self, x: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
        """`cross_entropy` of the last layer's (B, T, C) and targets (B, T), whole: an own head may mix tokens."""
        return cross_entropy(self.logits(x), targets, z_loss)


def build_own_model(
    model: ModelConfig, seed: int, allowed: Collection[str], layers: range | None = None, *, has_ends: bool = True
) -> nn.Module:
    """The model, or a stage of it, with the initial weights of the run's seed, in fp32 on the CPU.

    Raises `TrainingError` if the function is not allowed or not installed, or makes another model than the run's.
    """
    own = model.own
    assert own is not None
    maker = load_function(own.function, own.package, allowed)
    made = call(maker, own.config, model.context, model.vocabulary, seed)
    if isinstance(made, nn.Module):
        _require_same(made, own.ends, own)
        return require_fit(made)
    stage = OwnStage(made, seed, range(model.num_layers) if layers is None else layers, has_ends=has_ends)
    if has_ends:
        _require_same(stage.ends, own.ends, own)
    for layer in stage.layers.values():
        _require_same(layer, own.layer, own)
    return require_fit(stage, is_cut=model.num_stages > 1)


def call(
    maker: Maker, config: Mapping[str, Any], context: int, vocabulary: int, seed: int
) -> nn.Module | SectionedModel:
    """Call the function with the run's settings; raises `TrainingError` if its result is neither of the two types."""
    made = make_part(lambda: maker({**config, "context": context, "vocabulary": vocabulary}), seed, "whole")
    if isinstance(made, nn.Module | SectionedModel):
        return made
    raise TrainingError(
        f"the model's function returned a {type(made).__name__}: it must return an nn.Module, or an object with width, "
        "num_layers, ends() and layer(index)"
    )


def make_layer(sections: SectionedModel, index: int, seed: int) -> nn.Module:
    """A layer by its number."""
    return make_part(lambda: sections.layer(index), seed, f"layer {index}")


def make_part(make: Callable[[], _T], seed: int, part: str) -> _T:
    """Call foreign code while PyTorch draws from a separate generator; raises `TrainingError` if the code fails."""
    digest = hashlib.sha256(f"farandole/own/1\n{seed}\n{part}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        try:
            return make()
        except MemoryError:
            raise
        except Exception as error:  # whatever that code does
            raise TrainingError(f"the model's own code failed: {type(error).__name__}: {error}") from error


def shapes_in(module: nn.Module) -> Shapes:
    """Each parameter's shape by its name, in the order in which the module defines them."""
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def require_fit(module: nn.Module, *, is_cut: bool = False) -> nn.Module:
    """Return the module; raises `TrainingError` if it has a feature that training does not support."""
    for name, parameter in module.named_parameters():
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise TrainingError(
                f"the model's parameter {name} is {parameter.dtype} on {parameter.device}: make it float32 on the CPU; "
                "farandole moves it to the device, and computes in bfloat16 there where that pays"
            )
        if not parameter.requires_grad:
            raise TrainingError(f"the model's parameter {name} takes no gradient: register it as a buffer instead")
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats:
            raise TrainingError(
                f"the model's {name} keeps running statistics, which nodes do not exchange: take a norm without them"
            )
        if is_cut and isinstance(part, nn.modules.dropout._DropoutNd) and part.p:
            raise TrainingError(
                f"the model's {name} is dropout: in stages, work that was lost is done again and must come out the "
                "same; let the run's config make it 0"
            )
    return module


def _require_same(module: nn.Module, expected: Mapping[str, tuple[int, ...]], own: OwnModel) -> None:
    """Raises `TrainingError` where the installed code makes other parameters than the run's creator had."""
    found = shapes_in(module)
    if list(found.items()) == list(expected.items()):
        return
    name = next((name for name in (*expected, *found) if expected.get(name) != found.get(name)), "")
    what = f"{name}: {found.get(name, 'none')}, and the run's {expected.get(name, 'none')}" if name else "their order"
    version = f", {own.package}" if own.package else ""
    raise TrainingError(
        f"{own.function} makes other parameters than this run has ({what}): install the version that the run was "
        f"made with{version}"
    )
