"""A model cut into stages: contiguous layers, and for stage 0 both ends of the model as well.

Stage 0 embeds the tokens, and it is to stage 0 that the last stage's output returns: it makes the logits and the loss
(`farandole.training.engine.stage_worker`). So the targets stay with the replica that drew them, and weights that the
embedding and the head share have one owner, where both ends' gradients arrive.

Where the model is cut, `farandole.protocol.run.models` says. Initial weights follow from the seed and a parameter's
name (`model.initialise_`), so on one kind of processor all stages together are the whole model, bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from farandole.protocol.run.manifest import ModelConfig
from farandole.protocol.run.models import layers_of

from ..base.errors import TrainingError, how_to_add
from .model import StageModule, build_model
from .own_model import build_own_model


def build_module(
    model: ModelConfig,
    seed: int,
    layers: range | None = None,
    *,
    has_ends: bool = True,
    allowed_models: Collection[str] = (),
) -> nn.Module:
    """The model, or a stage of it, of any kind: with the initial weights of the run's seed, in fp32 on the CPU.

    ``allowed_models`` are the functions that this node's owner allows to make one. Raises `TrainingError` if the
    model's is not among them, or not installed, or if it is one of transformers', and that is not installed.
    """
    if model.own is not None:
        return build_own_model(model, seed, allowed_models, layers, has_ends=has_ends)
    if model.hf is None:
        return build_model(model, seed, layers, has_ends=has_ends)
    try:
        from .hf import build_hf_model
    except ImportError as error:
        raise TrainingError(f"this run's model is one of transformers': {how_to_add('hf')}") from error
    return build_hf_model(model, seed, layers, has_ends=has_ends)


def build_stage(model: ModelConfig, seed: int, stage: int, allowed_models: Collection[str] = ()) -> StageModule:
    """Stage ``stage`` of the model, as `build_module` makes it; nothing else is made.

    Raises `TrainingError` if there is no such stage.
    """
    if not 0 <= stage < model.num_stages:
        raise TrainingError(f"the model has stages 0 to {model.num_stages - 1}, not {stage}")
    module = build_module(model, seed, layers_of(model)[stage], has_ends=stage == 0, allowed_models=allowed_models)
    assert isinstance(module, StageModule), "a module without sections is not cut"
    return module
