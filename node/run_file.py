"""``run.toml``: a run as a person writes it, turned into a manifest.

The manifest's own fields, and three conveniences: a model by its preset's name or by its Hugging Face configuration
(`farandole.node.hf_file`), and a tokenizer by its file.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from farandole.protocol.errors import ManifestError
from farandole.protocol.manifest import Manifest, manifest_from_dict
from farandole.training.presets import PRESETS

from .hf_file import hf_model

# A run file is a page of settings.
MAX_RUN_FILE_BYTES: Final = 256 * 1024


def load_run_file(path: Path, now: float) -> Manifest:
    """The manifest that ``path`` describes, made at ``now`` (Unix seconds); `ManifestError` says what to mend."""
    settings = read_toml(path)
    try:
        return manifest_of(settings, path.parent, now)
    except ManifestError as error:
        raise ManifestError(f"{path}: {error}") from error


def read_toml(path: Path) -> dict[str, Any]:
    """A parsed TOML file; `ManifestError` if it is not there, too long, or not TOML."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ManifestError(f"cannot read {path}: {error.strerror}") from error
    if len(raw) > MAX_RUN_FILE_BYTES:
        raise ManifestError(f"{path} has {len(raw)} bytes: that is no run file")
    try:
        return tomllib.loads(raw.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"{path} is not TOML: {error}") from error


def manifest_of(settings: Mapping[str, Any], folder: Path, now: float) -> Manifest:
    """The manifest from a parsed run file; ``folder`` is where its relative paths start.

    Raises `ManifestError`, which names the field.
    """
    complete = dict(settings)
    if "model" not in complete:
        raise ManifestError(f"model is missing: name a preset ({', '.join(PRESETS)}) or write a [model] table")
    complete["model"] = _model(complete["model"], folder)
    if "tokenizer" in complete:
        complete["tokenizer"] = _tokenizer(complete["tokenizer"], folder)
    complete.setdefault("created_at", int(now))
    return manifest_from_dict(complete)


def _model(model: object, folder: Path) -> object:
    """``"3M"``, or a table, which may start from a preset, ``{preset = "3M", context = 512}``, or from ``hf``."""
    if isinstance(model, str):
        model = {"preset": model}
    if isinstance(model, Mapping) and "hf" in model:
        return hf_model(model, folder)
    if not isinstance(model, Mapping) or "preset" not in model:
        return model
    if model["preset"] not in PRESETS:
        raise ManifestError(f"model: no preset is called {model['preset']!r}; there are {', '.join(PRESETS)}")
    return {**PRESETS[model["preset"]], **{name: value for name, value in model.items() if name != "preset"}}


def _tokenizer(tokenizer: object, folder: Path) -> object:
    """``{file = "tokenizer.json"}`` becomes the hash by which every node will know the file."""
    if not isinstance(tokenizer, Mapping) or "file" not in tokenizer:
        return tokenizer
    path = folder / str(tokenizer["file"])
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ManifestError(f"tokenizer.file: cannot read {path}: {error.strerror}") from error
    rest = {name: value for name, value in tokenizer.items() if name != "file"}
    return {"kind": "tokenizers", "sha256": digest, **rest}
