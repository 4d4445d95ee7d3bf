"""A consolidated checkpoint as a Hugging Face folder, for `transformers` and all programs that read its files.

It has the slow weights, in fp32, as safetensors; the configuration of the family in which transformers computes the
same; the tokenizer; a page about the model's origin. Nothing is code.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Final

from farandole.protocol.run.manifest import Manifest
from farandole.protocol.run.vectors import SLOW
from farandole.training.base.errors import DataError
from farandole.training.data.tokenizer import SEPARATORS, Tokenizer, load_tokenizer

from .folder import Consolidated
from .hf_names import Part, config_json, config_of, parts_of
from .tensors import ConsolidatedError, Floats, TensorFile, new_folder, open_tensors, shards, write_file, write_tensors

# The default of transformers' `save_pretrained` until version 5; many hosts and file systems limit larger files.
MAX_SHARD_BYTES: Final = 5 * 10**9


def export_hf(
    folder: Consolidated, to: Path, tokenizer: Path | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> list[str]:
    """Write the folder ``to``, all of it or nothing; return the names of its files.

    ``tokenizer`` is the file that the run's manifest names by its hash, if it does; without it the folder has none.
    Raises `ConsolidatedError`.
    """
    manifest = folder.manifest
    config = config_of(manifest.model)
    loaded = _load_tokenizer(manifest, tokenizer)
    end_token = None if loaded is None else loaded.separator
    parts = parts_of(manifest)
    num_bytes = sum(4 * math.prod(part.shape) for part in parts.values())
    with new_folder(to, num_bytes) as temporary, open_tensors(folder.checkpoint) as file:
        _write_weights(temporary, file, parts, max_shard_bytes)
        write_json(temporary / "config.json", config_json(config, end_token=end_token))
        write_json(temporary / "generation_config.json", {"bos_token_id": end_token, "eos_token_id": end_token})
        _write_tokenizer(temporary, loaded, tokenizer)
        write_file(temporary / "README.md", _card(folder, loaded).encode())
        return sorted(path.name for path in temporary.iterdir())


def write_json(path: Path, value: object) -> None:
    """Write a value as indented JSON."""
    write_file(path, json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")


def _write_weights(to: Path, file: TensorFile, parts: dict[str, Part], max_shard_bytes: int) -> None:
    def tensor_of(name: str) -> Floats:
        part = parts[name]
        whole = file.read(f"{SLOW}/{part.name}")
        return whole[part.first : part.first + part.shape[0]]

    shapes = {name: part.shape for name, part in parts.items()}
    files = shards(shapes, max_shard_bytes)
    if len(files) == 1:
        names = ["model.safetensors"]
    else:
        names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
        total = sum(4 * math.prod(shape) for shape in shapes.values())
        places = {tensor: name for name, shard in zip(names, files, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_json(to / "model.safetensors.index.json", index)
    for name, shard in zip(names, files, strict=True):
        write_tensors(to / name, {"format": "pt"}, shard, tensor_of)


# Tokens


def _load_tokenizer(manifest: Manifest, path: Path | None) -> Tokenizer | None:
    """Return the run's tokenizer, or None if it is a file that was not given."""
    if path is None and manifest.tokenizer.kind != "bytes":
        return None
    if path is not None and manifest.tokenizer.kind == "bytes":
        raise ConsolidatedError("the run's tokens are bytes: it has no tokenizer file")
    try:
        return load_tokenizer(manifest.tokenizer, path)
    except DataError as error:
        raise ConsolidatedError(str(error)) from error


def _write_tokenizer(to: Path, tokenizer: Tokenizer | None, path: Path | None) -> None:
    if tokenizer is None:
        return
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


def byte_level_tokenizer() -> dict[str, object]:
    """Return a ``tokenizer.json`` whose 256 tokens are the bytes: byte-level BPE (GPT-2) without any merge.

    No token is special, not even NUL, which ends a document: a special token is matched in a text by its characters,
    and NUL's character here, U+0100, is two bytes in a text.
    """
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
            "vocab": {letter: byte for byte, letter in enumerate(_byte_letters())},
            "merges": [],
        },
    }


def _byte_letters() -> list[str]:
    """Return the character that stands for each byte: itself if it is visible, else one from U+0100 on.

    `bytes_to_unicode` of GPT-2's encoder (https://github.com/openai/gpt-2/blob/master/src/encoder.py).
    """
    letters, hidden = [], itertools.count(0x100)
    for byte in range(256):
        is_seen = 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF
        letters.append(chr(byte) if is_seen else chr(next(hidden)))
    return letters


# The page


def _card(folder: Consolidated, tokenizer: Tokenizer | None) -> str:
    manifest, index = folder.manifest, folder.index
    num_parameters = sum(math.prod(shape) for shape in folder.shapes.values())
    match manifest.tokenizer.kind, tokenizer:
        case "bytes", _:
            tokens = (
                "Tokens 0 to 255 are bytes: UTF-8 text as it is, one token a byte, and NUL (token 0) after each\n"
                "document. `tokenizer.json` says the same to `tokenizers`; without it, `list(text.encode())` does."
            )
        case _, None:
            tokens = (
                f"Its tokenizer is the file with SHA-256 `{manifest.tokenizer.sha256}`, which is not in this folder."
            )
        case _:
            tokens = "Its tokenizer is `tokenizer.json`."
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- farandole
---

# {manifest.name}

{num_parameters:,} parameters, trained by volunteers with farandole: {index.inner_steps:,} inner steps and
{index.tokens:,} tokens a replica, up to round {index.round:,} of run `{index.run_id.hex()}`. Contexts of
{manifest.model.context:,} tokens.

These are the slow weights of checkpoint `{folder.id.hex()}`, in fp32.

{tokens}

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(".")
```
"""
