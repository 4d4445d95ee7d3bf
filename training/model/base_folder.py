"""Hugging Face folders with a model's weights, and the base model of adapters, known by a hash. Imports no torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from ..base.errors import TrainingError

# Settings of a copy, which say nothing about what the model computes.
_OF_A_COPY: Final = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
MAX_INDEX_BYTES: Final = 16 * 1024 * 1024
# The files of a model of some hundred billion parameters: all are open at a time.
MAX_FILES: Final = 1_024
_FILE: Final = re.compile(r"[\w.-]{1,128}\.safetensors")


def base_hash(folder: Path) -> str:
    """Return the hash by which a run names a base model: of its settings, and of its safetensors, whatever their names.

    7 B parameters in bf16 take some seconds. Raises `TrainingError` if there are none, or they cannot be read.
    """
    settings = {name: value for name, value in base_config(folder).items() if name not in _OF_A_COPY}
    hashes = [blake3(json.dumps(settings, sort_keys=True).encode()).digest()]
    try:
        hashes += [blake3(max_threads=blake3.AUTO).update_mmap(path).digest() for path in weight_files(folder)]
    except OSError as error:
        raise TrainingError(f"the weights in {folder} cannot be read: {error}") from error
    return blake3(b"".join(sorted(hashes))).hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """Return the folder's safetensors files; raises `TrainingError` if it has none, or its index leads elsewhere."""
    index, file = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.exists():
        if not file.exists():
            raise TrainingError(f"{folder} needs its weights as {file.name}, or as several files with {index.name}")
        return [file]
    try:
        with index.open("rb") as opened:
            raw = opened.read(MAX_INDEX_BYTES + 1)
        names = set(json.loads(raw)["weight_map"].values())
        if len(raw) > MAX_INDEX_BYTES or len(names) > MAX_FILES or not all(_FILE.fullmatch(name) for name in names):
            raise ValueError(
                f"it has over {MAX_INDEX_BYTES} bytes or {MAX_FILES} files, or names that are no files beside it"
            )
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise TrainingError(f"{index} says not which file has which weights: {error}") from error
    return sorted(folder / name for name in names)


def base_config(folder: Path) -> dict[str, Any]:
    """Return the settings in the folder's ``config.json``; raises `TrainingError` if it has none."""
    try:
        settings = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise TrainingError(f"{folder} has no config.json that can be read: {error}") from error
    if not isinstance(settings, dict):
        raise TrainingError(f"{folder / 'config.json'} is no configuration of a model")
    return settings


def require_base(folder: Path, expected: str) -> None:
    """Raise `TrainingError`, with both hashes, unless the folder has the base model of this hash."""
    if (found := base_hash(folder)) != expected:
        raise TrainingError(
            f"{folder} is another base model than the run's: it has the hash {found}, and the run's "
            f"{expected}. Ask whoever invited you which model it is"
        )
