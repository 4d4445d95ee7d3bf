"""One's own module, made by a function that the node's owner has installed and allowed.

The function is given a dict, the run's ``config`` with ``context`` and ``vocabulary``, and returns one of two things:

- an `nn.Module` that makes logits (B, T, V) of tokens (B, T). It trains whole.
- `SectionedModel`, an object that makes the model's parts one by one. It trains whole, and can be cut into stages too.

Each part is made while PyTorch draws from a generator keyed with the run's seed and the part's name, so that every node
makes the same ones, and a stage the same as the whole. The run's creator tries the model once beforehand
(`farandole.training.model.own_model`); every node compares the parameters with the manifest's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor, nn

from farandole.protocol.run.manifest import ModelConfig
from farandole.protocol.run.own_model import ADAPTERS, OwnModel, count, expanded, packed

from ..base.errors import TrainingError
from .model import StageModule
from .own_function import Maker, load_function, package_of

Shapes = dict[str, tuple[int, ...]]
_T = TypeVar("_T")


@runtime_checkable
class SectionedModel(Protocol):
    """A maker of a model's parts. All layers are of one kind: their parameters have the same names and shapes."""

    width: int
    """C, of what goes from layer to layer."""
    num_layers: int

    def ends(self) -> nn.Module:
        """A new module of both ends, which may share weights: its ``embed`` and ``logits`` are as `StageModule`'s."""

    def layer(self, index: int) -> nn.Module:
        """A new layer ``index``, from 0: (B, T, C) for (B, T, C), and nothing else."""


class OwnStage(StageModule):
    """A model in sections, or a stage of it: some of its layers, and in the first stage both ends.

    Its loss is taken whole: an own head may mix tokens.
    """

    def __init__(self, sections: SectionedModel, seed: int, layers: range, *, has_ends: bool) -> None:
        super().__init__()
        if has_ends:
            self.ends = make_part(sections.ends, seed, "ends")
        self.layers = nn.ModuleDict({str(index): make_layer(sections, index, seed) for index in layers})

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, T, C) for tokens (B, T)."""
        return cast("StageModule", self.ends).embed(tokens)

    def advance(self, x: Tensor) -> Tensor:
        """(B, T, C) for (B, T, C), through this module's layers."""
        for layer in self.layers.values():
            x = layer(x)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """(B, T, V) for the last layer's (B, T, C)."""
        return cast("StageModule", self.ends).logits(x)


def build_own_model(
    model: ModelConfig, seed: int, allowed: Collection[str], layers: range | None = None, *, has_ends: bool = True
) -> nn.Module:
    """The model, or a stage of it, with the initial weights of the run's seed, in fp32 on the CPU.

    Raises `TrainingError` if the function is not allowed or not installed, or makes another model than the run's.
    """
    own = model.own
    assert own is not None
    maker = load_function(own.function, own.package, allowed)
    config = {**own.config, "parameters": count(own.ends)} if own.function == ADAPTERS else own.config
    made = call(maker, config, model.context, model.vocabulary, seed)
    if isinstance(made, nn.Module):
        _require_same(made, expanded(own.ends), own)
        return require_fit(made)
    stage = OwnStage(made, seed, range(model.num_layers) if layers is None else layers, has_ends=has_ends)
    if has_ends:
        _require_same(stage.ends, expanded(own.ends), own)
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


# Of logits, when a token after them changes: what another order of adding may do to them.
_CAUSAL_TOLERANCE = 1e-3
# A trial's texts are shorter than the run's where these would take more than this number of logits: 256 MiB.
_MAX_LOGITS = 2**26
_SEED = 0


def try_own_model(
    function: str, config: Mapping[str, Any], context: int, vocabulary: int, allowed: Collection[str]
) -> tuple[OwnModel, int, int]:
    """Create a user's own model, for a run's creator, and check that it can be trained at all.

    Returns its description for a manifest, its number of layers and its width: 1 and 0 if it has no sections.

    Next-token training says nothing of a model that sees the next token, and averaging says nothing of weights that
    began apart. Both would train, with a fine loss, for nothing. So both are looked for here, on the CPU: of a model in
    sections with its ends and one layer, of a whole one with all of it. Raises `TrainingError`, which names what to
    fix.
    """
    length = min(context, max(2, _MAX_LOGITS // vocabulary))
    maker = load_function(function, "", allowed)
    made = call(maker, config, context, vocabulary, _SEED)
    if function == ADAPTERS and isinstance(
        made, nn.Module
    ):  # of a model that transformers makes: the trials would take minutes
        return OwnModel(function, packed(shapes_in(require_fit(made))), {}, dict(config)), 1, 0
    if isinstance(made, nn.Module):
        again = call(maker, config, context, vocabulary, _SEED)
        assert isinstance(again, nn.Module)
        _require_same_weights(require_fit(made), again)
        _require_causal(made, length, vocabulary)
        return OwnModel(function, packed(shapes_in(made)), {}, dict(config), package_of(function)), 1, 0
    stage = OwnStage(made, _SEED, range(1), has_ends=True)
    require_fit(stage)
    _require_same_weights(stage, OwnStage(made, _SEED, range(1), has_ends=True))
    _require_sections(made, stage, length)
    _require_causal(stage, length, vocabulary)
    shapes = packed(shapes_in(stage.ends)), shapes_in(stage.layers["0"])
    return OwnModel(function, *shapes, dict(config), package_of(function)), made.num_layers, made.width


@torch.no_grad()
def _require_sections(sections: SectionedModel, stage: OwnStage, length: int) -> None:
    """Raise `TrainingError` unless every layer fulfils `SectionedModel`."""
    if missing := [name for name in ("embed", "logits") if not callable(getattr(stage.ends, name, None))]:
        raise TrainingError(f"what the model's ends() returns has no method {missing[0]}")
    first = shapes_in(stage.layers["0"])
    for index in range(1, sections.num_layers):
        if shapes_in(make_layer(sections, index, _SEED)) != first:
            raise TrainingError(
                f"the parameters of the model's layer {index} are not those of layer 0, in name and shape: all layers "
                "are of one kind, and what is not belongs to the ends"
            )
    tokens, expected = torch.zeros(2, length, dtype=torch.long), (2, length, sections.width)
    for name, run in (("embed", stage.embed), ("layer(0)", stage.last_hidden)):
        made = make_part(partial(run, tokens), _SEED, name)
        if tuple(made.shape) != expected:
            raise TrainingError(f"the model's {name} makes {tuple(made.shape)} of two texts, and not {expected}")


def _require_same_weights(first: nn.Module, second: nn.Module) -> None:
    others = dict(second.named_parameters())
    for name, parameter in first.named_parameters():
        if name not in others or not torch.equal(parameter, others[name]):
            raise TrainingError(
                f"the model's parameter {name} is not the same when it is made twice from one seed: draw initial "
                "weights with PyTorch's own generator on the CPU, and let nothing else decide on them"
            )


@torch.no_grad()
def _require_causal(module: nn.Module, length: int, vocabulary: int) -> None:
    """Logits (B, T, V), of which those before a token do not depend on it."""
    generator = torch.Generator().manual_seed(_SEED)
    tokens = torch.randint(vocabulary, (1, length), generator=generator).repeat(2, 1)
    changed = length // 2
    tokens[1, changed:] = (tokens[1, changed:] + 1) % vocabulary
    was_training = module.training
    logits = make_part(lambda: module.eval()(tokens), _SEED, "trial")
    module.train(was_training)
    if not isinstance(logits, Tensor) or tuple(logits.shape) != (2, length, vocabulary):
        found = tuple(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise TrainingError(
            f"the model makes {found} of tokens {(2, length)}: it must make logits {(2, length, vocabulary)}"
        )
    if not bool(torch.isfinite(logits).all()):
        raise TrainingError("the model's first logits are not finite: look at its initial weights")
    before = logits[:, :changed].float()
    if float((before[0] - before[1]).abs().max()) > _CAUSAL_TOLERANCE * float(before.abs().max()):
        raise TrainingError(
            "the model's logits change when a later token changes: it sees what it is to predict. Attend to the past "
            "alone (is_causal=True)"
        )
