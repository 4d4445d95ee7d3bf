"""Models of Hugging Face ``transformers`` (extra ``hf``), whole or a stage of them, made of transformers' own modules.

A stage is what `farandole.training.model.model.Transformer` is: some of the layers, and in the first stage both ends.
The layers, norms and embeddings are transformers' classes, called as transformers' models call them: causal attention
by `scaled_dot_product_attention`, no padding, no cache. Parameters have the names that they have in transformers' whole
model, so the state dicts of all stages together are one of `LlamaForCausalLM` or `GPT2LMHeadModel`.

Modules are made on the meta device, without memory and without drawing numbers, and then given memory: for this stage's
parameters, and no others. Initial weights have the family's standard deviation, and each parameter is drawn from a
generator keyed with (seed, its name), as in `farandole.training.model.model`, so all stages together are the whole.

Nothing is downloaded, and no code is but what is installed.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
from torch import nn
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig

from farandole.protocol.run.manifest import ModelConfig

from .families.gpt2 import GPT2Stage
from .families.llama import LlamaStage
from .model import fill_

# PyTorch's own: it knows causal attention without a mask in memory, and has no randomness.
_ATTENTION = "sdpa"


_FAMILIES = {"llama": (LlamaConfig, LlamaStage), "gpt2": (GPT2Config, GPT2Stage)}
# A microbatch whose stage is lost is computed again, and must come out the same (`farandole.protocol.run.families`).
_NO_DROPOUT = dict.fromkeys(("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)


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
    return config_type(**settings, **_NO_DROPOUT, **no_tokens, attn_implementation=_ATTENTION)


def initialise_(module: nn.Module, seed: int, config: PreTrainedConfig) -> None:
    """Fill every parameter with the standard deviations of transformers' `_init_weights`: ``initializer_range``, and
    in GPT-2 over sqrt(2 layers) for the ones that write into the residual stream.
    """
    std, of_residuals = config.initializer_range, math.sqrt(2 * config.num_hidden_layers)
    names = [name for name, _ in module.named_parameters()]
    fill_(module, seed, {name: std / of_residuals if name.endswith(".c_proj.weight") else std for name in names})
