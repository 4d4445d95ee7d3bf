"""The parameters of a whole model by name and shape, and the stage of each, without building it. Imports no torch.

The order is that in which the modules define them (`farandole.training.model`, `hf`, `own_model`), so what is written
by these shapes and what a module of the whole model saves lie alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from .cut import layers_of
from .hf_config import GPT2Config, HFConfig, LlamaConfig
from .manifest import ModelConfig
from .own_model import OwnModel
from .safetensors import Shape

# What each kind of model calls its layers; every other parameter belongs to the model's ends.
_LAYER = re.compile(r"(?:model\.|transformer\.)?(?:layers|h)\.(\d+)\.")


def shapes_of(model: ModelConfig) -> dict[str, Shape]:
    """Each parameter's shape by its name, of all stages together."""
    if model.own is not None:
        return _own(model.own, model.num_layers)
    if model.hf is not None:
        return _llama(model.hf) if isinstance(model.hf, LlamaConfig) else _gpt2(model.hf)
    width, hidden = model.width, model.hidden
    layer = {
        "attention_norm.weight": (width,),
        "attention.qkv.weight": (3 * width, width),
        "attention.out.weight": (width, width),
        "mlp_norm.weight": (width,),
        "mlp.gate_up.weight": (2 * hidden, width),
        "mlp.down.weight": (width, hidden),
    }
    layers = _repeated("layers", model.num_layers, layer)
    return {"embedding.weight": (model.vocabulary, width), **layers, "norm.weight": (width,)}


def stage_of(model: ModelConfig, name: str) -> int:
    """Which stage holds a parameter."""
    if model.num_stages == 1:  # one's own module may call anything "layers.9"
        return 0
    match = _LAYER.match(name)
    if match is None:
        return 0
    layer = int(match[1])
    return next(stage for stage, layers in enumerate(layers_of(model)) if layer in layers)


def names_of_stage(model: ModelConfig, stage: int) -> frozenset[str]:
    """The parameters that a stage holds."""
    return frozenset(name for name in shapes_of(model) if stage_of(model, name) == stage)


def _own(own: OwnModel, num_layers: int) -> dict[str, Shape]:
    if not own.has_sections:
        return dict(own.ends)
    ends = {f"ends.{name}": shape for name, shape in own.ends.items()}
    return {**ends, **_repeated("layers", num_layers, own.layer)}


def _repeated(prefix: str, count: int, layer: Mapping[str, Shape]) -> dict[str, Shape]:
    return {f"{prefix}.{index}.{name}": shape for index in range(count) for name, shape in layer.items()}


def _linear(name: str, outputs: int, inputs: int, *, bias: bool) -> dict[str, Shape]:
    return {f"{name}.weight": (outputs, inputs), **({f"{name}.bias": (outputs,)} if bias else {})}


def _llama(settings: LlamaConfig) -> dict[str, Shape]:
    width, hidden, head = settings.hidden_size, settings.intermediate_size, settings.head_dim
    queries, keys = settings.num_attention_heads * head, settings.num_key_value_heads * head
    attention_bias, mlp_bias = settings.attention_bias, settings.mlp_bias
    layer = {
        **_linear("self_attn.q_proj", queries, width, bias=attention_bias),
        **_linear("self_attn.k_proj", keys, width, bias=attention_bias),
        **_linear("self_attn.v_proj", keys, width, bias=attention_bias),
        **_linear("self_attn.o_proj", width, queries, bias=attention_bias),
        **_linear("mlp.gate_proj", hidden, width, bias=mlp_bias),
        **_linear("mlp.up_proj", hidden, width, bias=mlp_bias),
        **_linear("mlp.down_proj", width, hidden, bias=mlp_bias),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    return {
        **_repeated("model.layers", settings.num_hidden_layers, layer),
        "model.embed_tokens.weight": (settings.vocab_size, width),
        "model.norm.weight": (width,),
        **_head(settings, width),
    }


def _gpt2(settings: GPT2Config) -> dict[str, Shape]:
    width, hidden = settings.n_embd, settings.n_inner
    layer = {
        **_norm("ln_1", width),
        **_conv("attn.c_attn", width, 3 * width),
        **_conv("attn.c_proj", width, width),
        **_norm("ln_2", width),
        **_conv("mlp.c_fc", width, hidden),
        **_conv("mlp.c_proj", hidden, width),
    }
    return {
        **_repeated("transformer.h", settings.n_layer, layer),
        "transformer.wte.weight": (settings.vocab_size, width),
        "transformer.wpe.weight": (settings.n_positions, width),
        **_norm("transformer.ln_f", width),
        **_head(settings, width),
    }


def _norm(name: str, width: int) -> dict[str, Shape]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _conv(name: str, inputs: int, outputs: int) -> dict[str, Shape]:
    """`transformers.Conv1D`: a linear layer whose matrix lies the other way."""
    return {f"{name}.weight": (inputs, outputs), f"{name}.bias": (outputs,)}


def _head(settings: HFConfig, width: int) -> dict[str, Shape]:
    return {} if settings.tie_word_embeddings else {"lm_head.weight": (settings.vocab_size, width)}
