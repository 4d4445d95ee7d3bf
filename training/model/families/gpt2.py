"""GPT-2 made of transformers' own modules: the whole model, or a stage of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from ..model import LanguageModel


class GPT2Stage(LanguageModel):
    """`transformers.GPT2LMHeadModel`, or a stage of it; uninitialised until `initialise_`."""

    def __init__(self, config: GPT2Config, layers: range, *, has_ends: bool) -> None:
        super().__init__()
        self.vocabulary = config.vocab_size
        width, vocabulary = config.n_embd, config.vocab_size
        with torch.device("meta"):
            self.transformer = nn.ModuleDict(
                {"h": nn.ModuleDict({str(index): GPT2Block(config, index) for index in layers})}
            )
            if has_ends:
                self.transformer["wte"] = nn.Embedding(vocabulary, width)
                self.transformer["wpe"] = nn.Embedding(config.n_positions, width)
                self.transformer["ln_f"] = nn.LayerNorm(width, eps=config.layer_norm_epsilon)
                if not config.tie_word_embeddings:
                    self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.to_empty(device="cpu")
        self._head = "transformer.wte.weight" if config.tie_word_embeddings else "lm_head.weight"

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, T, C) for tokens (B, T)."""
        positions = torch.arange(tokens.size(1), device=tokens.device)[None]  # (1, T)
        x: Tensor = self.transformer["wte"](tokens) + self.transformer["wpe"](positions)
        return x

    def advance(self, x: Tensor) -> Tensor:
        """(B, T, C) for (B, T, C), through this module's layers."""
        for layer in self.transformer["h"].children():
            x = layer(x)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """(B, T, V) for the last layer's (B, T, C)."""
        return F.linear(self.transformer["ln_f"](x), self.get_parameter(self._head))
