"""How many parameters the parts of a model have, counted without building it. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .hf_config import GPT2Config, LlamaConfig
from .manifest import ModelConfig


@dataclass(frozen=True, slots=True)
class Parts:
    """Of one layer, and of both ends together: the embedding, the last norm, and a head that is not the embedding."""

    layer: int
    ends: int
    attention_width: int
    """Of all heads together; 0 of one's own module, which alone knows."""


def parts_of(model: ModelConfig) -> Parts:
    """What the model is made of."""
    if model.own is not None:
        return Parts(_count(model.own.layer), _count(model.own.ends), 0)
    if model.hf is not None:
        return _llama(model.hf) if isinstance(model.hf, LlamaConfig) else _gpt2(model.hf)
    width = model.width
    attention = 4 * width * width  # query, key, value, output
    mlp = 3 * width * model.hidden  # gate, up, down
    norms = 2 * width
    return Parts(attention + mlp + norms, model.vocabulary * width + width, width)


def _count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes.values()))


def _llama(settings: LlamaConfig) -> Parts:
    width, hidden, head = settings.hidden_size, settings.intermediate_size, settings.head_dim
    queries, keys = settings.num_attention_heads * head, settings.num_key_value_heads * head
    attention = 2 * width * queries + 2 * width * keys  # query, output; key, value
    if settings.attention_bias:
        attention += queries + 2 * keys + width
    mlp = 3 * width * hidden  # gate, up, down
    if settings.mlp_bias:
        mlp += 2 * hidden + width
    norms = 2 * width
    embeddings = settings.vocab_size * width * (1 if settings.tie_word_embeddings else 2)
    return Parts(attention + mlp + norms, embeddings + width, queries)


def _gpt2(settings: GPT2Config) -> Parts:
    width, hidden = settings.n_embd, settings.n_inner
    attention = 4 * (width + 1) * width  # query, key, value, output
    mlp = (width + 1) * hidden + (hidden + 1) * width
    norms = 2 * 2 * width
    embeddings = settings.vocab_size * width * (1 if settings.tie_word_embeddings else 2)
    return Parts(attention + mlp + norms, embeddings + settings.n_positions * width + 2 * width, width)
