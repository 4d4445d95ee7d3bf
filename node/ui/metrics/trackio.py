"""Rounds in Trackio: a database on this machine, or the Space or server that Trackio's own variables name.

Trackio queues what it gets, and only the end of a session waits until it is stored. So each batch of rounds is a
session, which resumes the run by its name. What a server did not take is kept by Trackio, and sent in a later session.
It reports faults only as warnings.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, Final

from .figures import RoundFigures
from .tracker import OpenedRun, ReportedRun, TrackerError, TrackerUnreachableError, plain

if not os.environ.get("TRACKIO_SPACE_ID") and not os.environ.get("TRACKIO_SERVER_URL"):
    # Else Trackio asks Hugging Face for the user's name, though nothing leaves this machine.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

import trackio  # its libraries read the variable when they are imported

# Parts of the warnings that are faults here: a session that does not know the run would begin another one.
_OF_START: Final = ("could not create a remote client", "could not inspect existing runs", "could not recover")
_OF_LOSSES: Final = ("could not be persisted", "could be lost", "may be dropped", "failed to process", "skipped")


class TrackioTracker:
    """A run of Trackio, resumed by its name."""

    def __init__(self, place: str) -> None:
        """``place``: the project."""
        self._project = place
        self._reported: ReportedRun | None = None
        self._session: Any = None

    def start(self, run: ReportedRun) -> OpenedRun:
        """Open the run (`farandole.node.ui.metrics.tracker.Tracker`)."""
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
        with _warnings_raised(_OF_LOSSES):
            for each in rounds:
                session.log(each.values, step=each.record.round)
            _end_session()

    def finish(self) -> None:
        """End the session that is open, if any."""
        if self._session is not None:
            _end_session()
            self._session = None

    def _open(self, run: ReportedRun | None) -> Any:
        if run is None:
            raise TrackerError("trackio: the run was not started")
        try:
            with redirect_stdout(io.StringIO()), _warnings_raised(_OF_START):
                session = trackio.init(
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


def _end_session() -> None:
    with redirect_stdout(io.StringIO()):
        trackio.finish()
