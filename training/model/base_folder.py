"""The base model of adapters: a folder that every member has, known by a hash. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from blake3 import blake3
from safetensors import SafetensorError, safe_open

from ..base.errors import TrainingError

# Settings of a copy, which say nothing about what the model computes.
_OF_A_COPY: Final = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")


def base_hash(folder: Path) -> str:
    """Return the hash by which a run names a base model: of its settings, and of its safetensors, whatever their names.

    7 B parameters in bf16 take some seconds. Raises `TrainingError` if there are none, or they cannot be read.
    """
    settings = {name: value for name, value in base_config(folder).items() if name not in _OF_A_COPY}
    hashes = [blake3(json.dumps(settings, sort_keys=True).encode()).digest()]
    with _files_of(folder) as paths:
        hashes += [blake3(max_threads=blake3.AUTO).update_mmap(path).digest() for path in paths]
    return blake3(b"".join(sorted(hashes))).hexdigest()


def base_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the folder's weights, by name; raises `TrainingError` as `base_hash` does."""
    shapes = dict[str, tuple[int, ...]]()
    with _files_of(folder) as paths:
        for path in paths:
            with safe_open(path, framework="numpy") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # no mapping
    return shapes


@contextmanager
def _files_of(folder: Path) -> Iterator[set[Path]]:
    """Yield the files of weights; raise `TrainingError` if there are none, or they cannot be read."""
    try:
        index = folder / "model.safetensors.index.json"
        parts = json.loads(index.read_bytes())["weight_map"].values() if index.exists() else ["model.safetensors"]
        yield {folder / name for name in parts}
    except (OSError, ValueError, LookupError, AttributeError, TypeError, SafetensorError) as error:
        raise TrainingError(
            f"{folder} needs its weights as model.safetensors, or as several files with its index: {error}"
        ) from error


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
