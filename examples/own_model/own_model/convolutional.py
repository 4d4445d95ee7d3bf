"""A gated causal convolution a layer, in three parts that farandole can hold apart: see `build`."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

KERNEL = 4


class Layer(nn.Module):
    """Mixes each token with the three before it, by a gate, beside the residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Conv1d(width, 2 * width, KERNEL, groups=width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) for (B, T, C)."""
        past = F.pad(self.norm(x).transpose(1, 2), (KERNEL - 1, 0))  # nothing of what comes after
        return x + self.out(F.glu(self.mix(past), dim=1).transpose(1, 2))


class Ends(nn.Module):
    """The embedding, and the head that shares its weights."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.norm = nn.LayerNorm(width)

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, T, C) for tokens (B, T)."""
        return self.embedding(tokens)

    def logits(self, x: Tensor) -> Tensor:
        """(B, T, V) for the last layer's (B, T, C)."""
        return F.linear(self.norm(x), self.embedding.weight)


class Sections:
    """What farandole asks for the parts that a node holds, and for no others."""

    def __init__(self, vocabulary: int, width: int, depth: int) -> None:
        self.vocabulary = vocabulary
        self.width = width
        self.num_layers = depth

    def ends(self) -> Ends:
        """Both ends; they may share weights, since one node holds them."""
        return Ends(self.vocabulary, self.width)

    def layer(self, index: int) -> Layer:
        """A layer, of the same parameters as every other."""
        return Layer(self.width)


def build(config: dict[str, Any]) -> Sections:
    """The model: ``config`` is [model.config] of the run file, with ``context`` and ``vocabulary`` of [model]."""
    return Sections(config["vocabulary"], config.get("width", 64), config.get("depth", 4))


def build_whole(config: dict[str, Any]) -> nn.Module:
    """The same as one module, which makes logits (B, T, V) of tokens (B, T): enough for a model that is not cut."""
    return Whole(build(config))


class Whole(nn.Module):
    """All parts."""

    def __init__(self, sections: Sections) -> None:
        super().__init__()
        self.ends = sections.ends()
        self.blocks = nn.Sequential(*(sections.layer(index) for index in range(sections.num_layers)))

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T, V) for tokens (B, T)."""
        return self.ends.logits(self.blocks(self.ends.embed(tokens)))
