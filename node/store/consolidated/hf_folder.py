"""Hugging Face folders: a consolidated checkpoint is written as one, and the weights of one start a run.

A written folder, for `transformers` and all programs that read its files, has the slow weights, in fp32, as
safetensors; the configuration of the family in which transformers computes the same; the tokenizer. That of a run of
adapters is for the package peft: `PeftModel.from_pretrained` loads it. A folder that is read may have any family that
`farandole.node.store.run_file` knows. Only safetensors are read: a ``.bin`` is a pickle, which is code.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from farandole.protocol.run.families import HFConfig
from farandole.protocol.run.families.llama import DefaultRope, LlamaConfig
from farandole.protocol.run.manifest import Manifest, ModelConfig
from farandole.protocol.run.models import shapes_of
from farandole.protocol.run.own_model import ADAPTERS
from farandole.protocol.run.rules import SLOW
from farandole.protocol.wire.safetensors import FP32_BYTES, Shape
from farandole.training.base.errors import DataError, TrainingError
from farandole.training.data.tokenizer import SEPARATORS, Tokenizer, load_tokenizer
from farandole.training.model.base_folder import weight_files

from .folder import Consolidated
from .tensors import ConsolidatedError, Floats, TensorFile, new_folder, open_tensors, write_file, write_tensors

# The names of parameters in transformers
#
# farandole's own model is Llama's (RMSNorm, rotary embeddings on halves, SwiGLU, tied embeddings). The only difference:
# here one matrix holds queries, keys and values, and another holds the gate and the projection that it multiplies.

# `farandole.training.model.model`: ROTARY_BASE and NORM_EPSILON, which are constants there.
_ROTARY_BASE = 10_000.0
_NORM_EPSILON = 1e-6

# Before and inside the names of adapters (`farandole.training.model.adapters.Adapted`). peft leaves the latter, its own
# adapter's name, out of the file, too.
_ADAPTED: Final = "adapted."
_ADAPTER_NAME: Final = ".default."

_FILE: Final = "model.safetensors"

Part = tuple[str, int, Shape]
"""Rows of one of our parameters: its name, the first row, and the part's shape, which begins with their number."""


def config_of(model: ModelConfig) -> HFConfig:
    """Return the settings of the family that computes the same in transformers; else raise `ConsolidatedError`."""
    if model.own is not None or model.external is not None:
        maker = "its members' loops" if model.own is None else model.own.function
        raise ConsolidatedError(
            f"the model is one's own, made by {maker}: transformers knows none like it. Its weights are in "
            "checkpoint.safetensors, by the names slow/..."
        )
    if model.hf is not None:
        return model.hf
    return LlamaConfig(
        vocab_size=model.vocabulary,
        hidden_size=model.width,
        intermediate_size=model.hidden,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_heads,
        head_dim=model.width // model.num_heads,
        max_position_embeddings=model.context,
        rope_parameters=DefaultRope(_ROTARY_BASE),
        rms_norm_eps=_NORM_EPSILON,
        tie_word_embeddings=True,
    )


def parts_of(manifest: Manifest) -> dict[str, Part]:
    """Return the part of our parameters for each name in transformers, in the order in which they are written."""
    if manifest.model.hf is not None:  # the names are transformers' own
        return {name: (name, 0, shape) for name, shape in shapes_of(manifest.model).items()}
    model = manifest.model
    if _has_adapters(model):
        names = {name: name.removeprefix(_ADAPTED).replace(_ADAPTER_NAME, ".") for name in shapes_of(model)}
        return {names[name]: (name, 0, shape) for name, shape in shapes_of(model).items()}
    width, hidden = model.width, model.hidden
    parts: dict[str, Part] = {"model.embed_tokens.weight": ("embedding.weight", 0, (model.vocabulary, width))}
    for index in range(model.num_layers):
        theirs, ours = f"model.layers.{index}", f"layers.{index}"
        for number, name in enumerate(("q_proj", "k_proj", "v_proj")):
            rows = (f"{ours}.attention.qkv.weight", number * width, (width, width))
            parts[f"{theirs}.self_attn.{name}.weight"] = rows
        parts[f"{theirs}.self_attn.o_proj.weight"] = (f"{ours}.attention.out.weight", 0, (width, width))
        for number, name in enumerate(("gate_proj", "up_proj")):
            rows = (f"{ours}.mlp.gate_up.weight", number * hidden, (hidden, width))
            parts[f"{theirs}.mlp.{name}.weight"] = rows
        parts[f"{theirs}.mlp.down_proj.weight"] = (f"{ours}.mlp.down.weight", 0, (width, hidden))
        parts[f"{theirs}.input_layernorm.weight"] = (f"{ours}.attention_norm.weight", 0, (width,))
        parts[f"{theirs}.post_attention_layernorm.weight"] = (f"{ours}.mlp_norm.weight", 0, (width,))
    parts["model.norm.weight"] = ("norm.weight", 0, (width,))
    return parts


def _has_adapters(model: ModelConfig) -> bool:
    return model.own is not None and model.own.function == ADAPTERS


def export_hf(folder: Consolidated, to: Path, tokenizer: Path | None = None) -> list[str]:
    """Write the folder ``to``, all of it or nothing; return the names of its files.

    ``tokenizer`` is the file that the run's manifest names by its hash, if it does; without it the folder has none.
    Raises `ConsolidatedError`.
    """
    manifest = folder.manifest
    own = manifest.model.own if _has_adapters(manifest.model) else None
    config = config_of(manifest.model) if own is None else None
    parts = parts_of(manifest)
    shapes = {name: shape for name, (_, _, shape) in parts.items()}
    num_bytes = sum(FP32_BYTES * math.prod(shape) for shape in shapes.values())
    with new_folder(to, num_bytes) as temporary, open_tensors(folder.checkpoint) as file:

        def tensor_of(name: str) -> Floats:
            ours, first, shape = parts[name]
            return file.read(f"{SLOW}/{ours}")[first : first + shape[0]]

        file_name = _FILE if own is None else "adapter_model.safetensors"
        write_tensors(temporary / file_name, {"format": "pt"}, shapes, tensor_of)
        if own is not None:
            adapted = {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": None,
                "inference_mode": True,
                "r": own.config["rank"],
                "lora_alpha": own.config["alpha"],
                "target_modules": sorted({name.split(".lora_")[0].rpartition(".")[2] for name in parts}),
            }
            write_json(temporary / "adapter_config.json", adapted)
        if config is not None:
            loaded = _write_tokenizer(temporary, manifest, tokenizer)
            end_token = None if loaded is None else loaded.separator
            tokens = {"bos_token_id": end_token, "eos_token_id": end_token}
            settings = {  # the configuration, and values for what transformers would otherwise default
                "architectures": [config.architecture],
                "dtype": "float32",
                **tokens,
                **msgspec.to_builtins(config),
                **config.older_settings,
            }
            write_json(temporary / "config.json", settings)
            write_json(temporary / "generation_config.json", tokens)
        return sorted(path.name for path in temporary.iterdir())


def write_json(path: Path, value: object) -> None:
    """Write a value as indented JSON."""
    write_file(path, json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")


# Tokens


def _write_tokenizer(to: Path, manifest: Manifest, path: Path | None) -> Tokenizer | None:
    """Write the run's tokenizer and return it; None if it is a file that was not given."""
    if path is None and manifest.tokenizer.kind != "bytes":
        return None
    if path is not None and manifest.tokenizer.kind == "bytes":
        raise ConsolidatedError("the run's tokens are bytes: it has no tokenizer file")
    try:
        tokenizer = load_tokenizer(manifest.tokenizer, path)
    except DataError as error:
        raise ConsolidatedError(str(error)) from error
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    if path is None:
        write_json(to / "tokenizer.json", byte_level_tokenizer())
    else:
        write_file(to / "tokenizer.json", path.read_bytes())
        if (name := tokenizer.decode([tokenizer.separator])) in SEPARATORS:
            settings["eos_token"] = name
    write_json(to / "tokenizer_config.json", settings)
    return tokenizer


def byte_level_tokenizer() -> dict[str, object]:
    """Return a ``tokenizer.json`` whose 256 tokens are the bytes: byte-level BPE (GPT-2) without any merge.

    No token is special, not even NUL, which ends a document: a special token is matched in a text by its characters,
    and NUL's character here, U+0100, is two bytes in a text. The character that stands for a byte is itself if it is
    visible, else one from U+0100 on: `bytes_to_unicode` of GPT-2's encoder
    (https://github.com/openai/gpt-2/blob/master/src/encoder.py).
    """
    hidden = itertools.count(0x100)
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters = [chr(byte if byte in seen else next(hidden)) for byte in range(256)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {letter: byte for byte, letter in enumerate(letters)},
            "merges": [],
        },
    }


# Weights of a folder, for continued pre-training


@contextlib.contextmanager
def open_hf_weights(folder: Path, manifest: Manifest) -> Iterator[Callable[[str], Floats]]:
    """Open a function that reads one of the folder's weights by our name, while the block runs.

    Raises `ConsolidatedError` unless the folder has all weights of the manifest's model, in its shapes.
    """
    try:
        paths = weight_files(folder)
    except TrainingError as error:
        raise ConsolidatedError(str(error)) from error
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open_tensors(path)) for path in paths]
        places = {name: file for file in files for name in file.shapes}
        found: dict[str, tuple[TensorFile, str]] = {}
        for name, shape in shapes_of(manifest.model).items():
            # Files of a model without its head leave out the prefix of the whole model's parameter names.
            bare = name.removeprefix("transformer.").removeprefix("model.")
            theirs = name if name in places else bare
            if theirs not in places:
                raise ConsolidatedError(f"{folder} has no weights {name}, which its configuration asks for")
            if (held := places[theirs].shapes[theirs]) != shape:
                raise ConsolidatedError(f"{folder}: {name} has the shape {held}, its configuration makes it {shape}")
            found[name] = places[theirs], theirs
        yield lambda name: found[name][0].read(found[name][1])
