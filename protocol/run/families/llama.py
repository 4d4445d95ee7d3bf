"""Llama: its settings, its parameters by name and shape, and how a ``config.json`` becomes its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec

from ...wire.safetensors import Shape
from . import base

_Factor = Annotated[float, msgspec.Meta(ge=1, le=1e6)]
_Theta = Annotated[float, msgspec.Meta(ge=1, le=1e12)]


class DefaultRope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="rope_type", tag="default"):
    """Rotary embeddings, arXiv 2104.09864."""

    rope_theta: _Theta = 10_000.0


class LinearRope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="rope_type", tag="linear"):
    """Positions divided by ``factor``, arXiv 2306.15595."""

    factor: _Factor
    rope_theta: _Theta = 10_000.0


class Llama3Rope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="rope_type", tag="llama3"):
    """Low frequencies divided by ``factor``, as in Llama 3.1."""

    factor: _Factor
    low_freq_factor: _Factor
    high_freq_factor: _Factor
    original_max_position_embeddings: base.Context
    rope_theta: _Theta = 10_000.0

    def __post_init__(self) -> None:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError("low_freq_factor must be less than high_freq_factor")


class LlamaConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="model_type", tag="llama"):
    """`transformers.LlamaForCausalLM`: RMSNorm, rotary embeddings, grouped heads, a gated MLP."""

    architecture: ClassVar[str] = "LlamaForCausalLM"
    layers_name: ClassVar[str] = "model.layers"

    vocab_size: base.Vocabulary
    hidden_size: base.Width
    intermediate_size: base.Hidden
    num_hidden_layers: base.NumLayers
    num_attention_heads: base.NumHeads
    num_key_value_heads: base.NumHeads
    head_dim: base.HeadWidth
    max_position_embeddings: base.Context = 2_048
    rope_parameters: DefaultRope | LinearRope | Llama3Rope = DefaultRope()
    hidden_act: base.Activation = "silu"
    initializer_range: base.InitialStd = 0.02
    rms_norm_eps: base.Epsilon = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        base.check_multiple("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads)
        base.check_multiple(
            "num_attention_heads", self.num_attention_heads, "num_key_value_heads", self.num_key_value_heads
        )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}: rotary embeddings turn pairs")

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes under the names of `farandole.protocol.run.manifest.ModelConfig`."""
        return {
            "num_layers": self.num_hidden_layers,
            "width": self.hidden_size,
            "num_heads": self.num_attention_heads,
            "hidden": self.intermediate_size,
            "vocabulary": self.vocab_size,
        }

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence."""
        return self.max_position_embeddings

    @property
    def attention_width(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def layer_shapes(self) -> dict[str, Shape]:
        """The parameters of a layer by name."""
        width, hidden = self.hidden_size, self.intermediate_size
        queries, keys = self.attention_width, self.num_key_value_heads * self.head_dim
        return {
            **base.linear("self_attn.q_proj", queries, width, bias=self.attention_bias),
            **base.linear("self_attn.k_proj", keys, width, bias=self.attention_bias),
            **base.linear("self_attn.v_proj", keys, width, bias=self.attention_bias),
            **base.linear("self_attn.o_proj", width, queries, bias=self.attention_bias),
            **base.linear("mlp.gate_proj", hidden, width, bias=self.mlp_bias),
            **base.linear("mlp.up_proj", hidden, width, bias=self.mlp_bias),
            **base.linear("mlp.down_proj", width, hidden, bias=self.mlp_bias),
            "input_layernorm.weight": (width,),
            "post_attention_layernorm.weight": (width,),
        }

    @property
    def end_shapes(self) -> dict[str, Shape]:
        """The parameters of both ends by name."""
        return {
            "model.embed_tokens.weight": (self.vocab_size, self.hidden_size),
            "model.norm.weight": (self.hidden_size,),
            **base.head(is_tied=self.tie_word_embeddings, vocabulary=self.vocab_size, width=self.hidden_size),
        }

    @property
    def older_settings(self) -> dict[str, Any]:
        """The settings under the names that tools from before transformers 5 read."""
        rope = msgspec.to_builtins(self.rope_parameters)
        theta = rope.pop("rope_theta")
        return {"rope_theta": theta, "rope_scaling": None if isinstance(self.rope_parameters, DefaultRope) else rope}


def settings_from_json(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a ``config.json``, completed with the ones that transformers derives from them."""
    heads = settings.get("num_attention_heads")
    if settings.get("num_key_value_heads") is None:
        settings["num_key_value_heads"] = heads
    width = settings.get("hidden_size")
    if settings.get("head_dim") is None and isinstance(width, int) and isinstance(heads, int) and heads > 0:
        settings["head_dim"] = width // heads
    theta, scaling = settings.pop("rope_theta", None), settings.pop("rope_scaling", None)  # until transformers 5
    rope = settings.get("rope_parameters") or scaling or {}
    if isinstance(rope, Mapping):
        kind = rope.get("rope_type", rope.get("type", "default"))
        rest = {name: value for name, value in rope.items() if name != "type"}
        rope = {**({} if theta is None else {"rope_theta": theta}), **rest, "rope_type": kind}
    return {**settings, "rope_parameters": rope}
