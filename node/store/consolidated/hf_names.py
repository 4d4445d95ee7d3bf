"""The names of a model's parameters in transformers, and the part of our parameters that each one is.

farandole's own model is Llama's (RMSNorm, rotary embeddings on halves, SwiGLU, tied embeddings). The only difference:
here one matrix holds queries, keys and values, and another holds the gate and the projection that it multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from farandole.protocol.run.cut import shapes_of
from farandole.protocol.run.families import HFConfig
from farandole.protocol.run.families.llama import DefaultRope, LlamaConfig
from farandole.protocol.run.manifest import Manifest, ModelConfig
from farandole.protocol.wire.safetensors import Shape

from .tensors import ConsolidatedError

# `farandole.training.model.model`: ROTARY_BASE and NORM_EPSILON, which are constants there.
_ROTARY_BASE = 10_000.0
_NORM_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one of our parameters."""

    name: str
    first: int
    """The first row."""
    shape: Shape
    """The shape of the part: its first number is the number of rows."""


def config_of(model: ModelConfig) -> HFConfig:
    """Return the settings of the family that computes the same in transformers; else raise `ConsolidatedError`."""
    if model.own is not None or model.external is not None:
        maker = "its members' loops" if model.own is None else model.own.function
        raise ConsolidatedError(
            f"the model is one's own, made by {maker}: transformers knows none like it. Its weights are in "
            "checkpoint.safetensors, by the names slow/..."
        )
    if model.hf is not None:
        return model.hf
    return LlamaConfig(
        vocab_size=model.vocabulary,
        hidden_size=model.width,
        intermediate_size=model.hidden,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_heads,
        head_dim=model.width // model.num_heads,
        max_position_embeddings=model.context,
        rope_parameters=DefaultRope(_ROTARY_BASE),
        rms_norm_eps=_NORM_EPSILON,
        tie_word_embeddings=True,
    )


def parts_of(manifest: Manifest) -> dict[str, Part]:
    """Return the part of our parameters for each name in transformers, in the order in which they are written."""
    if manifest.model.hf is not None:  # the names are transformers' own
        return {name: Part(name, 0, shape) for name, shape in shapes_of(manifest.model).items()}
    model = manifest.model
    width, hidden = model.width, model.hidden
    parts = {"model.embed_tokens.weight": Part("embedding.weight", 0, (model.vocabulary, width))}
    for index in range(model.num_layers):
        theirs, ours = f"model.layers.{index}", f"layers.{index}"
        for number, name in enumerate(("q_proj", "k_proj", "v_proj")):
            rows = Part(f"{ours}.attention.qkv.weight", number * width, (width, width))
            parts[f"{theirs}.self_attn.{name}.weight"] = rows
        parts[f"{theirs}.self_attn.o_proj.weight"] = Part(f"{ours}.attention.out.weight", 0, (width, width))
        for number, name in enumerate(("gate_proj", "up_proj")):
            rows = Part(f"{ours}.mlp.gate_up.weight", number * hidden, (hidden, width))
            parts[f"{theirs}.mlp.{name}.weight"] = rows
        parts[f"{theirs}.mlp.down_proj.weight"] = Part(f"{ours}.mlp.down.weight", 0, (width, hidden))
        parts[f"{theirs}.input_layernorm.weight"] = Part(f"{ours}.attention_norm.weight", 0, (width,))
        parts[f"{theirs}.post_attention_layernorm.weight"] = Part(f"{ours}.mlp_norm.weight", 0, (width,))
    parts["model.norm.weight"] = Part("norm.weight", 0, (width,))
    return parts


def config_json(config: HFConfig, *, end_token: int | None) -> dict[str, Any]:
    """Return a ``config.json``: the configuration, and values for what transformers would otherwise default."""
    return {
        "architectures": [config.architecture],
        "dtype": "float32",
        "bos_token_id": end_token,
        "eos_token_id": end_token,
        **msgspec.to_builtins(config),
        **config.older_settings,
    }
