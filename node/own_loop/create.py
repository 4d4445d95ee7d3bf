"""A run for loops of members' own, made from a model: `create_run`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import nn

from farandole.protocol.errors import ManifestError
from farandole.protocol.external_model import recipe_hash
from farandole.protocol.manifest import MAX_MANIFEST_BYTES, Manifest, manifest_from_dict, sign_manifest
from farandole.protocol.vectors import SLOW
from farandole.training.external import parameters_of

from ..base.identity import load_or_create_key
from ..base.settings import NodeSettings
from ..store.consolidated.folder import MANIFEST_NAME, NO_RUN, WeightCounters, write_folder
from ..store.consolidated.tensors import Floats

START_NAME: Final = "start"
# The user's loop waits for nothing where the outer step may be late.
_ROUNDS: Final = {"overlap": True}


def create_run(
    model: nn.Module,
    folder: str | Path,
    *,
    name: str = "own-loop",
    recipe: str = "",
    with_frozen: bool = False,
    rounds: Mapping[str, Any] | None = None,
    **sections: Any,
) -> Path:
    """Make a run that starts from this model's weights, in a new data directory; returns the directory.

    Members share the parameters that require a gradient, and with ``with_frozen`` the others too. ``recipe`` is what
    members agree on in words (batch size, data, precision): its hash goes into the manifest. ``rounds`` and
    ``sections`` are those of a run file: ``rounds={"round_seconds": 60}``, ``outer={"codec": "int8"}``,
    ``admission="invited"``. Raises `ManifestError`, or `ConsolidatedError` if the directory cannot be written.
    """
    home = NodeSettings(home=Path(folder))
    parameters = parameters_of(model, with_frozen=with_frozen)
    shapes = {each: tuple(parameter.shape) for each, parameter in parameters.items()}
    sizes = dict.fromkeys(("width", "num_heads", "hidden", "context", "vocabulary"), 0)
    external = {"parameters": shapes, "recipe": recipe_hash(recipe) if recipe else ""}
    settings = {
        "name": name,
        "created_at": int(time.time()),
        "model": {"num_layers": 1, **sizes, "external": external},
        "rounds": {**_ROUNDS, **(rounds or {})},
        **sections,
    }
    size = len(msgspec.msgpack.encode(_starting_from(settings, NO_RUN)))  # before anything is written
    if size > MAX_MANIFEST_BYTES:
        raise ManifestError(
            f"the names and shapes of {len(shapes)} parameters make a manifest of {size} bytes, and "
            f"{MAX_MANIFEST_BYTES} is the most"
        )
    start = home.home / START_NAME
    if start.exists():
        raise ManifestError(f"{start} is there already: a run is made in a directory of its own")
    key = load_or_create_key(home.key)

    def weights(tensor: str) -> Floats:
        parameter = parameters[tensor.partition("/")[2]]
        copied: Floats = parameter.detach().to("cpu", torch.float32).contiguous().numpy()
        return copied

    def signed(checkpoint: bytes) -> bytes:
        return sign_manifest(_starting_from(settings, checkpoint), key).encode()

    write_folder(start, key, NO_RUN, shapes, (SLOW,), WeightCounters(0, 0, 0), weights, signed)
    return home.home


def _starting_from(settings: Mapping[str, Any], checkpoint: bytes) -> Manifest:
    return manifest_from_dict({**settings, "start": {"id": checkpoint.hex(), "run_id": NO_RUN.hex()}})


def start_of(folder: Path) -> Path | None:
    """The checkpoint, with the manifest, that `create_run` has put into this directory; None if it has not."""
    start = folder / START_NAME
    return start if (start / MANIFEST_NAME).is_file() else None
