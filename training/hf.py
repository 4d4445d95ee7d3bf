"""Models of Hugging Face ``transformers`` (extra ``hf``), whole or a stage of them, made of transformers' own modules.

A stage is what `farandole.training.model.Transformer` is: some of the layers, and in the first stage both ends. The
layers, norms and embeddings are transformers' classes, called as transformers' models call them: causal attention by
`scaled_dot_product_attention`, no padding, no cache. Parameters have the names that they have in transformers' whole
model, so the state dicts of all stages together are one of `LlamaForCausalLM` or `GPT2LMHeadModel`.

Modules are made on the meta device, without memory and without drawing numbers, and then given memory: for this stage's
parameters, and no others. Initial weights have the family's standard deviation, and each parameter is drawn from a
generator keyed with (seed, its name), as in `farandole.training.model`, so all stages together are the whole.

Nothing is downloaded, and no code is but what is installed.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from farandole.protocol.manifest import ModelConfig

from .model import generator_for

# PyTorch's own: it knows causal attention without a mask in memory, and has no randomness.
_ATTENTION = "sdpa"


class LlamaStage(nn.Module):
    """`transformers.LlamaForCausalLM`, or a stage of it; uninitialised until `initialise_`."""

    def __init__(self, config: LlamaConfig, layers: range, *, has_ends: bool) -> None:
        super().__init__()
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

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V) for tokens (B, T), of the whole model."""
        return self.logits(self.advance(self.embed(tokens)))

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


class GPT2Stage(nn.Module):
    """`transformers.GPT2LMHeadModel`, or a stage of it; uninitialised until `initialise_`."""

    def __init__(self, config: GPT2Config, layers: range, *, has_ends: bool) -> None:
        super().__init__()
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

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V) for tokens (B, T), of the whole model."""
        return self.logits(self.advance(self.embed(tokens)))

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


_FAMILIES = {"llama": (LlamaConfig, LlamaStage), "gpt2": (GPT2Config, GPT2Stage)}
# A microbatch whose stage is lost is computed again, and must come out the same (`farandole.protocol.hf_config`).
_NO_DROPOUT = {
    "llama": {"attention_dropout": 0.0},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


def build_hf_model(model: ModelConfig, seed: int, layers: range | None = None, *, has_ends: bool = True) -> nn.Module:
    """The model, or a stage of it, with the initial weights of the run's seed, in fp32 on the CPU."""
    config = hf_config(model)
    _, stage_type = _FAMILIES[config.model_type]
    stage = stage_type(config, range(model.num_layers) if layers is None else layers, has_ends=has_ends)
    initialise_(stage, seed, config)
    return stage


def hf_config(model: ModelConfig) -> PreTrainedConfig:
    """The model's settings as transformers takes them."""
    settings: dict[str, Any] = msgspec.to_builtins(model.hf)
    family = settings.pop("model_type")
    config_type, _ = _FAMILIES[family]
    no_tokens = {"bos_token_id": None, "eos_token_id": None}  # of the defaults' own vocabulary
    return config_type(**settings, **_NO_DROPOUT[family], **no_tokens, attn_implementation=_ATTENTION)


@torch.no_grad()
def initialise_(module: nn.Module, seed: int, config: PreTrainedConfig) -> None:
    """Fill every parameter, matrices from a generator keyed with (seed, its name), as `_init_weights` of transformers
    does by its own generator: standard deviation ``initializer_range``, and in GPT-2 over sqrt(2 layers) for those that
    write into the residual stream.
    """
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith(".bias") else 1.0)  # biases; gains of norms
            continue
        std = config.initializer_range
        if name.endswith(".c_proj.weight"):
            std /= math.sqrt(2 * config.num_hidden_layers)
        parameter.normal_(0.0, std, generator=generator_for(seed, name))
