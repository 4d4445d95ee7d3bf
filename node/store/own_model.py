"""A user's own module: in a run file, and the checks of a node that joins such a run.

A run file has ``model = "mypackage.models:build"``, or a table with more settings:

    [model]
    own = "mypackage.models:build"
    context = 256
    vocabulary = 256
    config = {width = 128, depth = 4}     # the function's argument

The function is called once, if the owner of this machine allows it: what it makes goes into the manifest as names and
shapes (`farandole.protocol.run.own_model`). It needs torch, and takes as long as the model takes to make.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec

from farandole.protocol.run.families.base import Context, Vocabulary
from farandole.protocol.run.manifest import Manifest
from farandole.protocol.run.mixed_runs import why_no_loop
from farandole.protocol.run.own_model import FunctionName, Settings
from farandole.protocol.wire.errors import ManifestError
from farandole.training.base.errors import TrainingError
from farandole.training.model.own_function import require_allowed

from ..base.config.faults import FaultyError, faults_of
from ..base.errors import JoinError

# The context of both presets, and of byte-level text.
DEFAULT_CONTEXT: Final = 256
DEFAULT_VOCABULARY: Final = 256
# Settings that the function decides.
_DECIDED: Final = ("num_layers", "width", "num_heads", "hidden", "hf", "preset")


class _Table(msgspec.Struct, frozen=True):
    """The model table of a run file."""

    own: FunctionName
    context: Context = DEFAULT_CONTEXT
    vocabulary: Vocabulary = DEFAULT_VOCABULARY
    config: Settings = {}


def require_trainable_model(manifest: Manifest, allowed: Collection[str], *, by_loop: bool) -> None:
    """Raise `JoinError`, which says what to install and what to pass, unless this node can train the run's model.

    A model that a function makes needs the owner's permission; nothing is imported here, since only the trainer does
    that. A model that members train in loops of their own needs such a loop (``by_loop``); a built-in model accepts
    one, which brings the module. It needs the function only for the weights of the run's seed.
    """
    if manifest.model.external is not None and not by_loop:
        raise JoinError(
            "this run's members train in loops of their own: use farandole.NoLoCo in a script of yours, and farandole "
            "join with --trainer external where the node is not to end with the script"
        )
    if by_loop and (reason := why_no_loop(manifest)):
        raise JoinError(
            f"this run takes no loops of one's own: {reason}. Train with the built-in trainer (farandole join without "
            "--trainer external), or ask the run's creator for a run without that setting"
        )
    if manifest.model.own is None or (by_loop and manifest.start is not None):
        return
    try:
        require_allowed(manifest.model.own.function, manifest.model.own.package, allowed)
    except TrainingError as error:
        raise JoinError(str(error)) from error


def own_model(model: Mapping[str, Any], allowed: Collection[str]) -> dict[str, Any]:
    """Make a manifest's ``model`` table from one of a run file that has ``own``; other fields stay as they are.

    Raises `ManifestError`, which says what to correct: in the run file, in the model, or in what is allowed.
    """
    if decided := [name for name in _DECIDED if name in model]:
        raise ManifestError(f"model.{decided[0]}: what {model['own']} returns decides on it; leave it out")
    if faults := faults_of(model, _Table, place=("model",)):
        raise FaultyError(faults)
    table = msgspec.convert(model, _Table, strict=True)
    try:
        if table.own not in allowed:
            raise ManifestError(
                f"model.own: {table.own} is code of your own, and not allowed yet: install its package into "
                f"farandole's environment, and type the command again with --allow-model {table.own}"
            )
        from farandole.training.model.own_trial import try_own_model  # torch is imported for no other run file

        tried = try_own_model(table.own, table.config, table.context, table.vocabulary, allowed)
    except TrainingError as error:
        raise ManifestError(f"model.own: {error}") from error
    rest = {name: value for name, value in model.items() if name not in ("own", "config")}
    return {
        **rest,
        "context": table.context,
        "vocabulary": table.vocabulary,
        "num_layers": tried.num_layers,
        "width": tried.width,
        "num_heads": 0,
        "hidden": 0,
        "own": {
            "function": table.own,
            "config": table.config,
            "ends": tried.ends,
            "layer": tried.layer,
            "package": tried.package,
        },
    }
