"""Experiment trackers, behind one small protocol, and what they learn of a node.

A tracker is one file: `farandole.node.ui.metrics.trackio`, ``wandb``, ``mlflow``. Its library is an extra of the same
name, and is imported when the tracker is opened. `farandole.node.ui.metrics.report` drives it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from farandole.protocol.run.manifest import Manifest
from farandole.protocol.wire.errors import FarandoleError
from farandole.training.base.errors import how_to_add

from .figures import RoundFigures

# Longer than any name that people give, shorter than the limits of all trackers.
MAX_TEXT: Final = 120
_SECTIONS: Final = ("model", "data", "inner", "outer", "rounds", "screening")


class TrackerError(FarandoleError):
    """The tracker does not take this, now or later; the message says why."""


class TrackerUnreachableError(TrackerError):
    """The tracker did not answer or could not store; a later try may succeed."""


@dataclass(frozen=True)
class ReportedRun:
    """What a tracker learns of the run and of the member, besides the rounds."""

    name: str
    """The run's name, and the last characters of the member's peer id."""
    run_id: str
    peer_id: str
    settings: Mapping[str, str | float]
    """Settings of the manifest, such as ``outer.codec``, by their names there."""

    @property
    def key(self) -> str:
        """An id of the member in this run, of letters, digits and a hyphen."""
        return f"{self.run_id[:16]}-{self.peer_id[-16:]}"


@dataclass(frozen=True)
class OpenedRun:
    """A run at a tracker, new or resumed."""

    place: str
    """Where it is; the same after a restart."""
    is_new: bool
    """Whether it has no round yet, whatever was sent to this place before."""
    where: str
    """For people: where to look at it."""


class Tracker(Protocol):
    """A run at a tracker. Each method raises `TrackerError`, after `TrackerUnreachableError` it may be called again."""

    def start(self, run: ReportedRun) -> OpenedRun:
        """Open the run, which goes on where it was if the tracker knows it."""

    def log(self, rounds: Sequence[RoundFigures]) -> None:
        """Send rounds; return when they will not be lost."""

    def finish(self) -> None:
        """End the run for now. It may be started again."""


@dataclass(frozen=True)
class _Library:
    """A tracker's module and class, and the variables that switch off what its library sends of its own accord."""

    module: str
    tracker: str
    quiet: Mapping[str, str]


# A variable that the user has set stays as it is.
_LIBRARIES: Final = {
    "trackio": _Library(
        ".trackio",
        "TrackioTracker",
        {"HF_HUB_DISABLE_TELEMETRY": "1", "GRADIO_ANALYTICS_ENABLED": "False"},
    ),
    "wandb": _Library(".wandb", "WandbTracker", {"WANDB_ERROR_REPORTING": "false"}),
    "mlflow": _Library(
        ".mlflow",
        "MlflowTracker",
        {
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false",
            # Pauses between attempts are this program's, and Ctrl-C waits for the end of an attempt.
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
            "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
        },
    ),
}
FORM: Final = "trackio:PROJECT|wandb:PROJECT|mlflow:EXPERIMENT"


def open_tracker(target: str) -> Tracker:
    """Return the tracker that a target such as ``wandb:my-project`` names; nothing is sent yet.

    Raises `TrackerError` if there is no such tracker, or its library is missing.
    """
    name, _, place = target.partition(":")
    library = _LIBRARIES.get(name)
    if library is None or not place:
        raise TrackerError(f"{target!r} names no tracker: write {FORM}")
    for variable, value in library.quiet.items():
        os.environ.setdefault(variable, value)
    try:
        module = importlib.import_module(library.module, __package__)
    except ImportError as error:
        raise TrackerError(f"{name} needs a Python package ({error}): {how_to_add(name)}") from error
    tracker: Tracker = getattr(module, library.tracker)(place)
    return tracker


def reported_run(manifest: Manifest, run_id: str, peer_id: str) -> ReportedRun:
    """Return what a tracker learns of a run: from the manifest only numbers and short texts under fixed names."""
    kinds = {kind: getattr(manifest.model, kind) for kind in ("hf", "own", "external")}
    settings: dict[str, str | float] = {
        "run": plain(manifest.name),
        "run id": run_id,
        "member": peer_id,
        "model.kind": next((kind for kind, of_kind in kinds.items() if of_kind is not None), "farandole"),
    }
    sections: dict[str, Any] = msgspec.to_builtins(manifest)
    for section in _SECTIONS:
        for name, value in sections[section].items():
            if isinstance(value, str):
                settings[f"{section}.{name}"] = plain(value)
            elif isinstance(value, int | float):
                settings[f"{section}.{name}"] = value
    return ReportedRun(f"{plain(manifest.name)} {peer_id[-8:]}", run_id, peer_id, settings)


def plain(text: str) -> str:
    """Return a short text without control characters and other characters that cannot be seen."""
    return "".join(each for each in text if each.isprintable())[:MAX_TEXT]
