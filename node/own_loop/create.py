"""A run for loops of members' own, made from a model: `create_run`."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import nn

from farandole.protocol.planning.planning import choices, complete, given_by
from farandole.protocol.run.exclusions import why_no_loop
from farandole.protocol.run.manifest import MAX_MANIFEST_BYTES, Manifest, decode_manifest, sign_manifest
from farandole.protocol.run.own_model import packed, recipe_hash
from farandole.protocol.run.rules import SLOW
from farandole.protocol.wire.errors import ManifestError
from farandole.training.base.errors import TrainingError
from farandole.training.base.parameters import check_can_be_averaged
from farandole.training.cluster.ranks import Follower, Order, open_ranks, parameters_of, whole_of
from farandole.training.model.base_folder import base_hash
from farandole.training.model.stages import build_module

from ..base.identity import load_or_create_key
from ..base.requirements import settings_with_reasons
from ..base.settings import NodeSettings, default_home
from ..state.store import MANIFEST_FACT, read_fact
from ..store.consolidated.folder import NO_RUN, write_folder
from ..store.consolidated.tensors import Floats
from ..store.run_file import manifest_of

logger = logging.getLogger(__name__)

START_NAME: Final = "start"


def create_run(
    model: nn.Module,
    folder: str | Path,
    *,
    name: str = "own-loop",
    recipe: str = "",
    with_frozen: bool = False,
    base: str | Path | None = None,
    rounds: Mapping[str, Any] | None = None,
    **sections: Any,
) -> Path:
    """Make a run that starts from this model's weights, in a new data directory; returns the directory.

    Members share the parameters that require a gradient, and with ``with_frozen`` the others too. ``recipe`` is what
    members agree on in words (batch size, data, precision): its hash goes into the manifest. ``base`` is the folder of
    the model that the parameters adapt, as peft's do: a loop whose model was loaded from another one is refused.
    ``rounds`` and ``sections`` are the sections of a run file: ``rounds={"round_seconds": 60}``,
    ``outer={"codec": "bf16"}``, ``admission="invited"``. What they leave open is chosen as ``run create`` chooses it,
    and logged. In several processes of `torch.distributed` each of them calls it, and rank 0 writes. Raises
    `FarandoleError` if a setting is wrong, or the directory cannot be written.
    """
    home, ranks = NodeSettings(home=Path(folder)), open_ranks()
    if not ranks.is_leader:
        Follower(ranks, model, None).end()
        return home.home
    try:
        parameters = parameters_of(model, with_frozen=with_frozen)
        if not parameters:
            raise TrainingError("no parameter of this model requires a gradient; with_frozen=True shares all")
        check_can_be_averaged(parameters)
        shapes = {each: tuple(parameter.shape) for each, parameter in parameters.items()}
        sizes = dict.fromkeys(("width", "num_heads", "hidden", "context", "vocabulary"), 0)
        external = {"parameters": packed(shapes), "recipe": recipe_hash(recipe) if recipe else ""}
        if base is not None:
            external["base"] = base_hash(Path(base))
        settings = {
            "name": name,
            "created_at": int(time.time()),
            "model": {"num_layers": 1, **sizes, "external": external},
            "rounds": {"overlap": True, **(rounds or {})},  # the user's loop does not wait if outer steps may be late
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
            raise ManifestError(
                f"{home.home} has a run already. To go on with it, pass the folder to NoLoCo as run=; for another run, "
                "name a new folder"
            )
        if ranks.are_many:  # which have parts of the parameters: they come to the host
            ranks.begin(list(parameters))
            ranks.tell(Order.READ)
        with torch.no_grad():
            wholes = {
                name: whole_of(parameter).detach().to("cpu" if ranks.are_many else parameter.device)
                for name, parameter in parameters.items()
            }
        if wrong := [name for name, whole in wholes.items() if not whole.isfinite().all()]:
            raise TrainingError(f"parameter {wrong[0]} has values that are not finite")
        key = load_or_create_key(home.key)

        def weights(tensor: str) -> Floats:
            parameter = wholes[tensor.partition("/")[2]]
            copied: Floats = parameter.to("cpu", torch.float32).contiguous().numpy()
            return copied

        def signed(checkpoint: bytes) -> bytes:
            return sign_manifest(_starting_from(settings, checkpoint), key).encode()

        write_folder(start, key, NO_RUN, shapes, (SLOW,), weights, signed)
    except BaseException:  # Ctrl-C too: the other ranks wait for an order
        ranks.tell(Order.FAILED)
        raise
    ranks.tell(Order.OVER)
    return home.home


def _starting_from(settings: Mapping[str, Any], checkpoint: bytes) -> Manifest:
    start = {"id": checkpoint.hex(), "run_id": NO_RUN.hex()}
    manifest = manifest_of({**settings, "start": start}, Path(), settings["created_at"])
    given = given_by(settings)
    completed = complete(manifest, given)
    if checkpoint != NO_RUN:
        for line in settings_with_reasons(choices(manifest, completed, given)):
            logger.info("chosen for lines of 20 Mbit/s: %s", line)
    return completed


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
    folder = Path(home) if home is not None else default_home()
    try:
        raw = read_fact(NodeSettings(home=folder).store, MANIFEST_FACT) if run is None else Path(run).read_bytes()
    except OSError as error:
        raise ManifestError(f"{run} is no manifest that can be read: {error.strerror}") from error
    if raw is None:
        raise ManifestError(f"{folder} knows no run: farandole join INVITE --trainer external, or name a manifest file")
    manifest, _ = decode_manifest(raw)
    if manifest.model.external is not None:
        raise ManifestError("this run's model is not farandole's: build it as its other members do")
    if reason := why_no_loop(manifest):
        raise ManifestError(f"this run takes no loops of one's own: {reason}")
    return build_module(manifest.model, manifest.seed, allowed_models=allow_model)
