"""``run.toml``: a run as a person writes it, turned into a manifest.

The manifest's own fields, and some conveniences: a model by its preset's name, by its Hugging Face configuration
(`farandole.node.store.hf_file`) or by the function that makes it (`farandole.node.store.own_model`), and a tokenizer by
its file.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from farandole.protocol.errors import ManifestError
from farandole.protocol.manifest import Manifest, manifest_from_dict
from farandole.protocol.presets import PRESETS, preset

from .hf_file import hf_model, hf_tokenizer
from .own_model import own_model

# A run file is a page of settings.
MAX_RUN_FILE_BYTES: Final = 256 * 1024
_HF_PREFIX: Final = "hf:"


def load_run_file(path: Path, now: float, allowed_models: Collection[str] = ()) -> Manifest:
    """The manifest that ``path`` describes, made at ``now`` (Unix seconds); `ManifestError` says what to mend.

    ``allowed_models`` are the functions that may be called to make one's own module.
    """
    settings = read_toml(path)
    try:
        return manifest_of(settings, path.parent, now, allowed_models)
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


def manifest_of(
    settings: Mapping[str, Any], folder: Path, now: float, allowed_models: Collection[str] = ()
) -> Manifest:
    """The manifest from a parsed run file; ``folder`` is where its relative paths start.

    ``allowed_models`` as in `load_run_file`. Raises `ManifestError`, which names the field.
    """
    complete = dict(settings)
    if "model" not in complete:
        raise ManifestError(
            f"model is missing: name a preset ({', '.join(PRESETS)}), a folder (hf:FOLDER) or a function "
            "(package.module:function), or write a [model] table"
        )
    model = _table(complete["model"])
    complete["model"] = _model(model, folder, allowed_models)
    if "tokenizer" not in complete and isinstance(model, Mapping) and "hf" in model:
        complete["tokenizer"] = hf_tokenizer(model["hf"], folder)
    complete["tokenizer"] = _tokenizer(complete.get("tokenizer", {}), folder)
    complete.setdefault("created_at", int(now))
    return manifest_from_dict(complete)


def _table(model: object) -> object:
    """``"3M"``, ``"hf:FOLDER"`` and ``"package.module:function"`` as tables."""
    match model:
        case str() if model.startswith(_HF_PREFIX):
            return {"hf": model.removeprefix(_HF_PREFIX)}
        case str() if ":" in model:
            return {"own": model}
        case str():
            return {"preset": model}
    return model


def _model(model: object, folder: Path, allowed_models: Collection[str]) -> object:
    """A table, which may start from a preset, ``{preset = "3M", context = 512}``, from ``hf``, or from ``own``."""
    if isinstance(model, Mapping) and isinstance(model.get("own"), str):
        return own_model(model, allowed_models)
    if isinstance(model, Mapping) and model.get("hf") is not None:
        return hf_model(model, folder)
    if not isinstance(model, Mapping) or "preset" not in model:
        return model
    rest = {name: value for name, value in model.items() if name != "preset"}
    return {**msgspec.structs.asdict(preset(str(model["preset"]))), **rest}


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
