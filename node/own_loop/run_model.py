"""The module of a run that built-in trainers train, for a loop of one's own: `model_of`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from torch import nn

from farandole.protocol.run.exclusions import why_no_loop
from farandole.protocol.run.manifest import Manifest, decode_manifest
from farandole.protocol.wire.errors import ManifestError
from farandole.training.model.stages import build_module

from ..base.settings import NodeSettings, default_home
from ..state.store import MANIFEST_FACT, read_fact


def model_of(
    run: str | Path | None = None, *, home: str | Path | None = None, allow_model: Collection[str] = ()
) -> nn.Module:
    """Build the model of a run, in fp32 on the CPU, with the weights of the run's seed.

    Its parameters have the names, shapes and order of the run's, so `NoLoCo` trains it, whole or sharded. farandole's
    own model returns logits (B, T, V) for tokens (B, T), and with targets (B, T) as a second argument the loss.

    ``run``: a manifest file, or None for the run of the node in ``home``, by default the usual data directory.
    ``allow_model``: functions that may make the model, if the run's is code of its own.

    Raises `FarandoleError` if there is no run, or one that takes no loops, or the model cannot be built here.
    """
    manifest = _of_node(Path(home) if home is not None else default_home()) if run is None else _of_file(Path(run))
    if manifest.model.external is not None:
        raise ManifestError("this run's model is not farandole's: build it as its other members do")
    if reason := why_no_loop(manifest):
        raise ManifestError(f"this run takes no loops of one's own: {reason}")
    return build_module(manifest.model, manifest.seed, allowed_models=allow_model)


def _of_node(home: Path) -> Manifest:
    raw = read_fact(NodeSettings(home=home).store, MANIFEST_FACT)
    if raw is None:
        raise ManifestError(f"{home} knows no run: farandole join INVITE --trainer external, or name a manifest file")
    return decode_manifest(raw)[0]


def _of_file(path: Path) -> Manifest:
    try:
        return decode_manifest(path.read_bytes())[0]
    except OSError as error:
        raise ManifestError(f"{path} is no manifest that can be read: {error.strerror}") from error
