"""The shapes of nanochat's GPT, written anew, in parts that farandole can hold apart: see `build`.

As in nanochat (github.com/karpathy/nanochat, July 2026): a depth decides everything, with a width of 64 x depth rounded
up to heads of 128; rotary positions; RMSNorm without weights, also after the embedding and of queries and keys; ReLU
squared; no biases; a head of its own, whose logits are capped at 15.

Left out is what needs the tokens in the middle of the model or differs from layer to layer, since a farandole model's
layers are alike and see nothing but (B, T, C): value embeddings, smear, backout, the scalars of the residual stream and
windows of attention. nanochat had none of them in its first months.

Sizes in the comments: B sequences, T tokens, C width, H heads, D = C / H, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH_OF_A_LAYER: Final = 64
HEAD_WIDTH: Final = 128
ROTARY_BASE: Final = 100_000.0
# Normed queries and keys are that much longer than 1, which makes attention sharper.
SHARPNESS: Final = 1.2
LOGIT_CAP: Final = 15.0
# A norm follows the embedding, so only the directions of its rows count, and a rate has a meaning only in proportion to
# this. nanochat has 0.8, and a rate of its own for it; this one learns well with the one rate of farandole's trainer.
EMBEDDING_STD: Final = 0.05
HEAD_STD: Final = 0.001
UP_SHARE: Final = 0.4


def width_of(depth: int, head_width: int = HEAD_WIDTH) -> int:
    """Return C of a depth: whole heads."""
    return -(-depth * WIDTH_OF_A_LAYER // head_width) * head_width


def norm(x: Tensor) -> Tensor:
    """Root-mean-square normalisation (..., C) of (..., C), without weights."""
    return F.rms_norm(x, (x.size(-1),))


def matrix(inputs: int, outputs: int, scale: float) -> nn.Linear:
    """Return a matrix without bias, with uniform weights of standard deviation ``scale / sqrt(inputs)``."""
    made = nn.Linear(inputs, outputs, bias=False)
    bound = scale * math.sqrt(3 / inputs)
    nn.init.uniform_(made.weight, -bound, bound)
    return made


class Layer(nn.Module):
    """One layer; at first it adds nothing to the residual stream."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, head_width: int, context: int) -> None:
        super().__init__()
        self.num_heads = width // head_width
        self.query, self.key, self.value = (matrix(width, width, 1) for _ in range(3))
        self.out = matrix(width, width, 0)
        self.up = matrix(width, 4 * width, UP_SHARE)
        self.down = matrix(4 * width, width, 0)
        frequencies = ROTARY_BASE ** (-torch.arange(0, head_width, 2) / head_width)  # (D / 2)
        angles = torch.arange(context)[:, None] * frequencies  # (T, D / 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) for (B, T, C)."""
        x = x + self.attend(norm(x))
        return x + self.down(F.relu(self.up(norm(x))).square())

    def attend(self, x: Tensor) -> Tensor:
        """Causal attention: (B, T, C) for (B, T, C)."""
        queries, keys, values = (self.heads(each(x)) for each in (self.query, self.key, self.value))
        queries, keys = (SHARPNESS * norm(self.turned(each)) for each in (queries, keys))
        y = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)  # (B, H, T, D)
        return self.out(y.transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        """(B, H, T, D) of (B, T, C)."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def turned(self, x: Tensor) -> Tensor:
        """Turn the pairs (i, i + D / 2) of (B, H, T, D) by the angles of their positions."""
        a, b = x.chunk(2, dim=-1)  # each (B, H, T, D / 2)
        cos, sin = self.cos[: x.size(2)], self.sin[: x.size(2)]
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class Ends(nn.Module):
    """The embedding, and the head, which share no weights."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.head.weight, std=HEAD_STD)

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, T, C) for tokens (B, T)."""
        return norm(self.embedding(tokens))

    def logits(self, x: Tensor) -> Tensor:
        """(B, T, V) for the last layer's (B, T, C)."""
        return LOGIT_CAP * torch.tanh(self.head(norm(x)).float() / LOGIT_CAP)


class Sections:
    """What farandole asks for the parts that a node holds, and for no others."""

    def __init__(self, depth: int, context: int, vocabulary: int, head_width: int) -> None:
        self.num_layers = depth
        self.width = width_of(depth, head_width)
        self.context, self.vocabulary, self.head_width = context, vocabulary, head_width

    def ends(self) -> Ends:
        """Both ends."""
        return Ends(self.vocabulary, self.width)

    def layer(self, index: int) -> Layer:
        """A layer, of the same parameters as every other."""
        return Layer(self.width, self.head_width, self.context)


class GPT(nn.Module):
    """All parts, for a loop of one's own."""

    def __init__(self, sections: Sections) -> None:
        super().__init__()
        self.ends = sections.ends()
        self.layers = nn.Sequential(*(sections.layer(index) for index in range(sections.num_layers)))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V) for tokens (B, T)."""
        return self.ends.logits(self.layers(self.ends.embed(tokens)))


def build(config: dict[str, Any]) -> Sections:
    """The model: ``config`` is [model.config] of the run file, with ``context`` and ``vocabulary`` of [model]."""
    head_width = config.get("head_width", HEAD_WIDTH)
    return Sections(config["depth"], config["context"], config["vocabulary"], head_width)
