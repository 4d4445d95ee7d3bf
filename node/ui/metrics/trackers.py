"""Experiment trackers, each a library with wandb's calls: Trackio, and Weights & Biases.

Both take ``init``, ``log`` and ``finish``, and resume a run. They differ in what an error is, in when a round is safe,
and in what they send of their own accord, which is switched off. The library is an extra of the tracker's name, and is
imported when the tracker is opened. `farandole.node.ui.metrics.report` drives it.

*wandb* hands all it gets to a process of its own, which writes it to a file below ``./wandb`` (``WANDB_DIR``) before it
sends it, and repeats what the server did not take. So what was logged is not lost when the server is away. The step is
the round. Steps of wandb only grow: a round that the node repeats after a crash stays as it was sent first.

*Trackio* has a database on this machine, or the Space or server that its own variables name. It queues what it gets,
and only the end of a session waits until it is stored. So each batch of rounds is a session, which resumes the run by
its name. What a server did not take is kept by Trackio, and sent in a later session. It reports faults only as
warnings.
"""

from __future__ import annotations

import importlib
import io
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from farandole.protocol.run.manifest import Manifest
from farandole.protocol.wire.errors import FarandoleError
from farandole.training.base.errors import how_to_add

from ...status.round_log import RoundFigures

# Longer than any name that people give, shorter than the limits of all trackers.
MAX_TEXT: Final = 120
FORM: Final = "trackio:PROJECT|wandb:PROJECT"
_SECTIONS: Final = ("model", "data", "inner", "outer", "rounds", "screening")
# Variables that switch off what a library sends of its own accord. One that the user has set stays as it is.
_QUIET: Final = {
    "trackio": {"HF_HUB_DISABLE_TELEMETRY": "1", "GRADIO_ANALYTICS_ENABLED": "False"},
    "wandb": {"WANDB_ERROR_REPORTING": "false"},
}
# Parts of Trackio's warnings that are faults here: a session that does not know the run would begin another one.
_FAULTS_OF_START: Final = ("could not create a remote client", "could not inspect existing runs", "could not recover")
_LOSSES: Final = ("could not be persisted", "could be lost", "may be dropped", "failed to process", "skipped")

# Nothing about this machine, its code and its output.
_WANDB_SETTINGS: Final = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "save_code": False,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
    "x_transaction_log_flush_interval": 1.0,  # seconds until wandb's file has what was logged; its own default is 15
    "host": "-",
    "program": "farandole",
    "init_timeout": 30.0,  # seconds to wait for the server; wandb's own default is 90
    "quiet": True,
}


class TrackerError(FarandoleError):
    """The tracker does not take this, now or later; the message says why."""


class TrackerUnreachableError(TrackerError):
    """The tracker did not answer or could not store; a later try may succeed."""


@dataclass(frozen=True)
class ReportedRun:
    """What a tracker learns of the run and of the member, besides the rounds."""

    name: str
    """The run's name, and the last characters of the member's peer id."""
    key: str
    """An id of the member in this run, of letters, digits and a hyphen."""
    settings: Mapping[str, str | float]
    """Settings of the manifest, such as ``outer.codec``, by their names there."""


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


def open_tracker(target: str) -> Tracker:
    """Return the tracker that a target such as ``wandb:my-project`` names; nothing is sent yet.

    Raises `TrackerError` if there is no such tracker, or its library is missing.
    """
    name, _, place = target.partition(":")
    if name not in _QUIET or not place:
        raise TrackerError(f"{target!r} names no tracker: write {FORM}")
    for variable, value in _QUIET[name].items():
        os.environ.setdefault(variable, value)
    if name == "trackio" and not os.environ.get("TRACKIO_SPACE_ID") and not os.environ.get("TRACKIO_SERVER_URL"):
        # Its libraries read this as they are imported. Else it asks Hugging Face for the user's name, though nothing
        # leaves this machine.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        library = importlib.import_module(name)
    except ImportError as error:
        raise TrackerError(f"{name} needs a Python package ({error}): {how_to_add(name)}") from error
    return (TrackioTracker if name == "trackio" else WandbTracker)(library, place)


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
    key = f"{run_id[:16]}-{peer_id[-16:]}"
    return ReportedRun(f"{plain(manifest.name)} {peer_id[-8:]}", key, settings)


def plain(text: str) -> str:
    """Return a short text without control characters and other characters that cannot be seen."""
    return "".join(each for each in text if each.isprintable())[:MAX_TEXT]


class WandbTracker:
    """A run of wandb, resumed by its id."""

    def __init__(self, wandb: Any, place: str) -> None:
        """``wandb``: the module; ``place``: ``PROJECT`` or ``ENTITY/PROJECT``."""
        self._wandb = wandb
        entity, _, project = place.rpartition("/")
        self._entity = entity or None
        self._project = project
        self._run: Any = None
        self._next_step = 0

    def start(self, run: ReportedRun) -> OpenedRun:
        """Open the run (`Tracker.start`)."""
        wandb = self._wandb
        try:
            # It returns False, and asks nobody, where there is no key; offline it needs none.
            if not wandb.setup().settings._offline and not wandb.login(prompt=False):
                raise TrackerError("wandb knows no key: wandb login, or set WANDB_API_KEY, or WANDB_MODE=offline")
            self._run = wandb.init(
                entity=self._entity,
                project=self._project,
                id=run.key,
                name=run.name,
                config=dict(run.settings),
                resume="allow",
                settings=wandb.Settings(**_WANDB_SETTINGS),
            )
        except wandb.errors.CommError as error:  # also for a key that could not be verified, since nobody answered
            raise TrackerUnreachableError(f"wandb: {plain(str(error))}") from error
        except (wandb.errors.Error, ValueError) as error:
            raise TrackerError(f"wandb: {plain(str(error))}") from error
        if self._run.disabled:
            raise TrackerError("wandb is disabled here (WANDB_MODE): use online or offline")
        self._next_step = int(self._run.starting_step)
        is_offline = bool(self._run.offline)
        return OpenedRun(
            f"wandb {'offline' if is_offline else 'online'} {self._entity} {self._project} {run.key}",
            is_new=not is_offline and not self._run.resumed,
            where=f"wandb sync {self._run.settings.sync_dir}" if is_offline else str(self._run.url),
        )

    def log(self, rounds: Sequence[RoundFigures]) -> None:
        """Hand rounds to wandb's process."""
        for each in rounds:
            if each.record.round >= self._next_step:
                row = {**each.values, "_timestamp": each.record.at}
                self._run.log(row, step=each.record.round, commit=True)  # else it waits for the next round
                self._next_step = each.record.round + 1

    def finish(self) -> None:
        """Wait until wandb has sent all that it has; offline, until it has written it."""
        if self._run is not None:
            self._run.finish()
            self._run = None


class TrackioTracker:
    """A run of Trackio, resumed by its name."""

    def __init__(self, trackio: Any, place: str) -> None:
        """``trackio``: the module; ``place``: the project."""
        self._trackio = trackio
        self._project = place
        self._reported: ReportedRun | None = None
        self._session: Any = None

    def start(self, run: ReportedRun) -> OpenedRun:
        """Open the run (`Tracker.start`)."""
        self._reported = run
        self._session = self._open(run)
        return OpenedRun(
            f"trackio {self._session.url} {self._project} {self._session.id}",
            is_new=False,  # a new run has a new id, thus another place
            where=self._session.url or f'trackio show --project "{self._project}"',
        )

    def log(self, rounds: Sequence[RoundFigures]) -> None:
        """Store rounds."""
        session = self._session or self._open(self._reported)
        self._session = None
        with _warnings_raised(_LOSSES):
            for each in rounds:
                session.log(each.values, step=each.record.round)
            self._end_session()

    def finish(self) -> None:
        """End the session that is open, if any."""
        if self._session is not None:
            self._end_session()
            self._session = None

    def _end_session(self) -> None:
        with redirect_stdout(io.StringIO()):
            self._trackio.finish()

    def _open(self, run: ReportedRun | None) -> Any:
        if run is None:
            raise TrackerError("trackio: the run was not started")
        try:
            with redirect_stdout(io.StringIO()), _warnings_raised(_FAULTS_OF_START):
                session = self._trackio.init(
                    project=self._project,
                    name=run.name,
                    config=dict(run.settings),
                    resume="allow",
                    embed=False,
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
        except TrackerError:
            raise
        except ValueError as error:
            raise TrackerError(f"trackio: {plain(str(error))}") from error
        except Exception as error:  # of whatever library Trackio uses for this place
            raise TrackerUnreachableError(f"trackio: {plain(str(error))}") from error
        session.config["_Username"] = None
        return session


@contextmanager
def _warnings_raised(texts: Sequence[str]) -> Iterator[None]:
    """Raise `TrackerUnreachableError` at the end of the block if Trackio has warned with one of these texts in it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for message in (str(each.message) for each in caught):
        if any(text in message for text in texts):
            raise TrackerUnreachableError(f"trackio: {plain(message)}")
