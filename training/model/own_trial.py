"""A first trial of a user's own model by a run's creator: its parameters, and whether it can be trained at all.

Next-token training says nothing of a model that sees the next token, and averaging says nothing of weights that began
apart. Both would train, with a fine loss, for nothing. So both are looked for here, on the CPU: of a model in sections
with its ends and one layer, of a whole one with all of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import TrainingError
from .own_function import load_function, package_of
from .own_model import OwnStage, SectionedModel, Shapes, call, make_layer, make_part, require_fit, shapes_in

# Of logits, when a token after them changes: what another order of adding may do to them.
_CAUSAL_TOLERANCE = 1e-3
# A trial's texts are shorter than the run's where these would take more than this number of logits: 256 MiB.
_MAX_LOGITS = 2**26
_SEED = 0


@dataclass(frozen=True, slots=True)
class Tried:
    """The description of a function's model for a manifest."""

    ends: Shapes
    layer: Shapes
    """Empty of a model without sections."""
    num_layers: int
    width: int
    """0 of a model without sections."""
    package: str


def try_own_model(
    function: str, config: Mapping[str, Any], context: int, vocabulary: int, allowed: Collection[str]
) -> Tried:
    """Create the model and check that it can be trained; raises `TrainingError`, which names what to fix."""
    length = min(context, max(2, _MAX_LOGITS // vocabulary))
    maker = load_function(function, "", allowed)
    made = call(maker, config, context, vocabulary, _SEED)
    if isinstance(made, nn.Module):
        again = call(maker, config, context, vocabulary, _SEED)
        assert isinstance(again, nn.Module)
        _require_same_weights(require_fit(made), again)
        _require_causal(made, length, vocabulary)
        return Tried(shapes_in(made), {}, 1, 0, package_of(function))
    stage = OwnStage(made, _SEED, range(1), has_ends=True)
    require_fit(stage)
    _require_same_weights(stage, OwnStage(made, _SEED, range(1), has_ends=True))
    _require_sections(made, stage, length)
    _require_causal(stage, length, vocabulary)
    layer = shapes_in(stage.layers["0"])
    return Tried(shapes_in(stage.ends), layer, made.num_layers, made.width, package_of(function))


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
    for what in ("embed", "advance"):
        x = _tried(stage, tokens, what)
        if tuple(x.shape) != expected:
            name = "embed" if what == "embed" else "layer(0)"
            raise TrainingError(f"the model's {name} makes {tuple(x.shape)} of two texts, and not {expected}")


@torch.no_grad()
def _tried(stage: OwnStage, tokens: Tensor, what: str) -> Tensor:
    def run() -> Tensor:
        x = stage.embed(tokens)
        return x if what == "embed" else stage.advance(x)

    return make_part(run, _SEED, what)


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
