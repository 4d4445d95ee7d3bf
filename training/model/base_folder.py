"""The base model of adapters: a folder that every member has, known by the hash of its weights. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blake3 import blake3

from ..base.errors import TrainingError


def base_hash(folder: Path) -> str:
    """Return the hash by which a run names a base model, of the contents of its safetensors, whatever their names.

    7 B parameters in bf16 take some seconds. Raises `TrainingError` if there are none, or they cannot be read.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise TrainingError(f"{folder} has no *.safetensors: name the folder of a Hugging Face model")
    try:
        hashes = [blake3(max_threads=blake3.AUTO).update_mmap(path).digest() for path in files]
    except OSError as error:
        raise TrainingError(f"cannot read the weights in {folder}: {error.strerror}") from error
    return blake3(b"".join(sorted(hashes))).hexdigest()


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
            f"{folder} is another base model than the run's: its weights have the hash {found}, and the run's "
            f"{expected}. Ask whoever invited you which model it is"
        )
