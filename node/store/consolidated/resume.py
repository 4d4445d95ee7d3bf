"""The manifest of a run that starts from a checkpoint: from another run's manifest, or from an imported model.

The model's sizes stay; all other settings may change: stages, codec, rounds, data, the length of the run. The learning
rate's schedule resumes where it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.planning.planning import BY_TOKENS, complete, given_by
from farandole.protocol.run.manifest import Manifest, SignedManifest, StartConfig, decode_manifest, sign_manifest
from farandole.protocol.run.models import shapes_of
from farandole.protocol.run.rules import SLOW
from farandole.protocol.wire.errors import ManifestError

from ..run_file import manifest_of
from .folder import MANIFEST_NAME, NO_RUN, Consolidated, write_folder
from .hf_folder import open_hf_weights

# A [model] table with one of these defines the model again; without, it gives changes only, such as the cut into
# stages.
_MODELS_BY: Final = ("preset", "hf", "own", "lora", "num_layers")
_OF_ONE_RUN: Final = ("created_at", "start", "version")


def resumed_manifest(folder: Consolidated, settings: Mapping[str, Any], place: Path, now: float) -> Manifest:
    """Make the manifest of a run that resumes from a folder.

    ``settings`` is a parsed run file, whose relative paths begin at ``place``; settings that it leaves out are kept.
    Raises `ManifestError`, which says what cannot be changed.
    """
    before: dict[str, Any] = msgspec.to_builtins(folder.manifest)
    merged = {name: value for name, value in before.items() if name not in _OF_ONE_RUN}
    for name in given_by(settings) & {*BY_TOKENS.values()}:  # the file may give them in tokens
        section, _, field = name.partition(".")
        merged[section] = {key: value for key, value in merged[section].items() if key != field}
    for name, value in settings.items():
        old = merged.get(name)
        merged[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, Mapping) else value
    model = merged["model"] = settings.get("model", {})
    if isinstance(model, Mapping) and not any(name in model for name in _MODELS_BY):
        left_out = ("num_stages", "stage_layers", *(["hf"] if before["model"]["hf"] is None else []))
        merged["model"] = {name: value for name, value in before["model"].items() if name not in left_out} | {**model}
    if "tokenizer" in settings:
        merged["tokenizer"] = settings["tokenizer"]
    start = StartConfig(folder.id.hex(), folder.index.run_id.hex(), folder.index.inner_steps, folder.index.tokens)
    merged["start"] = msgspec.to_builtins(start)
    manifest = manifest_of(merged, place, now)
    old, new = shapes_of(folder.manifest.model), shapes_of(manifest.model)
    for name in [*old, *new]:
        if old.get(name) != new.get(name):
            raise ManifestError(
                f"model: the checkpoint's is another one ({name} is {old.get(name)} there and {new.get(name)} here). "
                "Leave its sizes out of the run file, and they are the checkpoint's"
            )
    if folder.manifest.model.hf != manifest.model.hf:
        raise ManifestError("model.hf: the checkpoint's says something else; leave it out, and it is the checkpoint's")
    if folder.manifest.tokenizer != manifest.tokenizer:
        raise ManifestError("tokenizer: the checkpoint was made with another; leave it out, and it is the checkpoint's")
    if folder.epochs is None or other_slices(folder.manifest, manifest):
        return manifest
    if folder.epochs.epoch >= manifest.data.epochs:
        raise ManifestError(
            f"data.epochs is {manifest.data.epochs}, and so many are done: say how many there are to be in all, or 0 "
            "for text that is drawn at random, without end"
        )
    return msgspec.structs.replace(manifest, start=msgspec.structs.replace(start, epochs=folder.epochs))


def other_slices(before: Manifest, after: Manifest) -> str:
    """Return why the slices of the data that are done do not count any more; empty if slices and order are the same."""
    if not before.data.epochs or not after.data.epochs:
        return "one of the runs counts no epochs"
    settings = {
        "inner.batch_size": (before.inner.batch_size, after.inner.batch_size),
        "model.context": (before.model.context, after.model.context),
        "data.source": (before.data.source, after.data.source),
        "data.held_out": (before.data.held_out, after.data.held_out),
    }
    return next((f"{name} is {new}, and was {old}" for name, (old, new) in settings.items() if old != new), "")


def import_model(
    hf_folder: Path,
    settings: Mapping[str, Any],
    place: Path,
    to: Path,
    key: Ed25519PrivateKey,
    now: float,
) -> tuple[Manifest, SignedManifest]:
    """Write a Hugging Face folder's weights as the folder ``to``; sign the manifest of a run that starts from it.

    What the run file leaves open is chosen as for a new run, but for the optimizer and its learning rate. Returns the
    manifest before that, and the signed one.

    Raises `ManifestError` if the configuration or the run file will not do, `ConsolidatedError` if the weights will
    not, or cannot be written.
    """
    model = settings.get("model", {})
    if not isinstance(model, Mapping) or any(name in model for name in _MODELS_BY):
        raise ManifestError("model: the folder says which model it is; the run file says no more than how it is cut")
    written = manifest_of({**settings, "model": {**model, "hf": str(hf_folder.absolute())}}, place, now)
    given = given_by(settings)
    manifest = complete(written, given)

    def sign(checkpoint_id: bytes) -> bytes:
        start = StartConfig(checkpoint_id.hex(), NO_RUN.hex())
        return sign_manifest(msgspec.structs.replace(manifest, start=start), key).encode()

    with open_hf_weights(hf_folder, manifest) as read:
        write_folder(
            to,
            key,
            NO_RUN,
            shapes_of(manifest.model),
            (SLOW,),
            lambda tensor: read(tensor.partition("/")[2]),
            sign,
        )
    return written, decode_manifest((to / MANIFEST_NAME).read_bytes())[1]
