"""Hugging Face ``transformers`` causal language models in a manifest: the settings of the families that we know.

Field names and defaults are those of transformers' ``config.json`` (5.23; `transformers.LlamaConfig`, `GPT2Config`),
reduced to what decides the model's shape, its first weights and what it computes. Whatever a file says beside that is
dealt with where it is read (`farandole.node.store.hf_file`). A manifest states every field, so that no default of
anybody's version of transformers matters. Nothing here is code, or names any: the code is transformers' own.

There is no dropout: a microbatch whose stage is lost is computed again by another node, and must come out the same.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from .errors import ManifestError

NumLayers = Annotated[int, msgspec.Meta(ge=1, le=512)]
Width = Annotated[int, msgspec.Meta(ge=8, le=65_536)]
NumHeads = Annotated[int, msgspec.Meta(ge=1, le=1_024)]
Hidden = Annotated[int, msgspec.Meta(ge=8, le=262_144)]
Context = Annotated[int, msgspec.Meta(ge=8, le=1_048_576)]
Vocabulary = Annotated[int, msgspec.Meta(ge=2, le=2_000_000)]

Activation = Literal["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"]
_HeadWidth = Annotated[int, msgspec.Meta(ge=2, le=1_024)]
# Bounded at both ends, numbers are finite: msgspec refuses NaN where there is a bound.
_Factor = Annotated[float, msgspec.Meta(ge=1, le=1e6)]
_Theta = Annotated[float, msgspec.Meta(ge=1, le=1e12)]
_Epsilon = Annotated[float, msgspec.Meta(gt=0, le=1)]
_InitialStd = Annotated[float, msgspec.Meta(gt=0, le=1)]


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
    original_max_position_embeddings: Context
    rope_theta: _Theta = 10_000.0

    def __post_init__(self) -> None:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError("low_freq_factor must be less than high_freq_factor")


class LlamaConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="model_type", tag="llama"):
    """`transformers.LlamaForCausalLM`: RMSNorm, rotary embeddings, grouped heads, a gated MLP."""

    vocab_size: Vocabulary
    hidden_size: Width
    intermediate_size: Hidden
    num_hidden_layers: NumLayers
    num_attention_heads: NumHeads
    num_key_value_heads: NumHeads
    head_dim: _HeadWidth
    max_position_embeddings: Context = 2_048
    rope_parameters: DefaultRope | LinearRope | Llama3Rope = DefaultRope()
    hidden_act: Activation = "silu"
    initializer_range: _InitialStd = 0.02
    rms_norm_eps: _Epsilon = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        _refuse_odd_heads("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads)
        _refuse_odd_heads(
            "num_attention_heads", self.num_attention_heads, "num_key_value_heads", self.num_key_value_heads
        )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}: rotary embeddings turn pairs")

    @property
    def sizes(self) -> dict[str, int]:
        """As `farandole.protocol.manifest.ModelConfig` calls them."""
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


class GPT2Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="model_type", tag="gpt2"):
    """`transformers.GPT2LMHeadModel`: LayerNorm, learnt positions, biases everywhere."""

    vocab_size: Vocabulary
    n_embd: Width
    n_inner: Hidden
    n_layer: NumLayers
    n_head: NumHeads
    n_positions: Context = 1_024
    activation_function: Activation = "gelu_new"
    initializer_range: _InitialStd = 0.02
    layer_norm_epsilon: _Epsilon = 1e-5
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        _refuse_odd_heads("n_embd", self.n_embd, "n_head", self.n_head)

    @property
    def sizes(self) -> dict[str, int]:
        """As `farandole.protocol.manifest.ModelConfig` calls them."""
        return {
            "num_layers": self.n_layer,
            "width": self.n_embd,
            "num_heads": self.n_head,
            "hidden": self.n_inner,
            "vocabulary": self.vocab_size,
        }

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence: each position has a learnt vector."""
        return self.n_positions


HFConfig = LlamaConfig | GPT2Config


def _refuse_odd_heads(whole: str, size: int, part: str, count: int) -> None:
    if size % count:
        raise ValueError(f"{whole} ({size}) must be a multiple of {part} ({count})")


def hf_config_from_dict(settings: object) -> HFConfig:
    """A configuration from a parsed ``config.json``; `ManifestError` names the setting that is wrong."""
    try:
        config: HFConfig = msgspec.convert(settings, HFConfig, strict=True)
    except msgspec.ValidationError as error:
        raise ManifestError(f"model.hf: {error}") from error
    return config
