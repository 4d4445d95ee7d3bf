"""Llama made of transformers' own modules: the whole model, or a stage of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from ..model import LanguageModel


class LlamaStage(LanguageModel):
    """`transformers.LlamaForCausalLM`, or a stage of it; uninitialised until `initialise_`."""

    def __init__(self, config: LlamaConfig, layers: range, *, has_ends: bool) -> None:
        super().__init__()
        self.vocabulary = config.vocab_size
        width, vocabulary = config.hidden_size, config.vocab_size
        with torch.device("meta"):
            self.model = nn.ModuleDict(
                {"layers": nn.ModuleDict({str(index): LlamaDecoderLayer(config, index) for index in layers})}
            )
            if has_ends:
                self.model["embed_tokens"] = nn.Embedding(vocabulary, width)
                self.model["norm"] = LlamaRMSNorm(width, eps=config.rms_norm_eps)
                if not config.tie_word_embeddings:
                    self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.to_empty(device="cpu")
        self._head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        self.rotary = LlamaRotaryEmbedding(config)

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, T, C) for tokens (B, T)."""
        x: Tensor = self.model["embed_tokens"](tokens)
        return x

    def advance(self, x: Tensor) -> Tensor:
        """(B, T, C) for (B, T, C), through this module's layers."""
        angles = self.rotary(x, position_ids=torch.arange(x.size(1), device=x.device)[None])  # two of (1, T, D)
        for layer in self.model["layers"].children():
            x = layer(x, position_embeddings=angles)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """(B, T, V) for the last layer's (B, T, C)."""
        return F.linear(self.model["norm"](x), self.get_parameter(self._head))
