"""GPT-2: its settings, its parameters by name and shape, and how a ``config.json`` becomes its settings."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from ...wire.safetensors import Shape
from . import base


class GPT2Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="model_type", tag="gpt2"):
    """`transformers.GPT2LMHeadModel`: LayerNorm, learnt positions, biases everywhere."""

    architecture: ClassVar[str] = "GPT2LMHeadModel"
    layers_name: ClassVar[str] = "transformer.h"

    vocab_size: base.Vocabulary
    n_embd: base.Width
    n_inner: base.Hidden
    n_layer: base.NumLayers
    n_head: base.NumHeads
    n_positions: base.Context = 1_024
    activation_function: base.Activation = "gelu_new"
    initializer_range: base.InitialStd = 0.02
    layer_norm_epsilon: base.Epsilon = 1e-5
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        base.check_multiple("n_embd", self.n_embd, "n_head", self.n_head)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes under the names of `farandole.protocol.run.manifest.ModelConfig`."""
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

    @property
    def attention_width(self) -> int:
        """Width of all heads together."""
        return self.n_embd

    @property
    def layer_shapes(self) -> dict[str, Shape]:
        """The parameters of a layer by name."""
        width, hidden = self.n_embd, self.n_inner
        return {
            **base.norm("ln_1", width),
            **base.conv("attn.c_attn", width, 3 * width),
            **base.conv("attn.c_proj", width, width),
            **base.norm("ln_2", width),
            **base.conv("mlp.c_fc", width, hidden),
            **base.conv("mlp.c_proj", hidden, width),
        }

    @property
    def end_shapes(self) -> dict[str, Shape]:
        """The parameters of both ends by name."""
        return {
            "transformer.wte.weight": (self.vocab_size, self.n_embd),
            "transformer.wpe.weight": (self.n_positions, self.n_embd),
            **base.norm("transformer.ln_f", self.n_embd),
            **base.head(is_tied=self.tie_word_embeddings, vocabulary=self.vocab_size, width=self.n_embd),
        }

    @property
    def older_settings(self) -> dict[str, Any]:
        """The settings under the names that tools from before transformers 5 read."""
        return {}


def settings_from_json(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a ``config.json``, completed with the ones that transformers derives from them."""
    width = settings.get("n_embd")
    if settings.get("n_inner") is None and isinstance(width, int):
        settings["n_inner"] = 4 * width
    return settings
