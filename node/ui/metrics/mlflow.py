"""Rounds in MLflow: at a server, or in a local database.

`MlflowClient` sends exactly what it gets. (`mlflow.start_run` would add the user's name, the program's path and the git
commit.) Each request is over when the store has it, so nothing waits in this process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import sqlalchemy  # noqa: F401  # what MLflow needs for a database; without it the error comes only later
from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from .figures import RoundFigures
from .tracker import OpenedRun, ReportedRun, TrackerError, TrackerUnreachableError, plain

DEFAULT_EXPERIMENT: Final = "farandole"
TAG: Final = "farandole.member"
"""The tag by which a run is found again; its value is `ReportedRun.key`."""
# Limits of one request (mlflow.org/docs/latest/rest-api.html#log-batch).
_MAX_METRICS: Final = 1_000
_MAX_PARAMETERS: Final = 100
# Anything else may be a fault of the network, or of a server that is about to come back.
_FINAL: Final = {
    "BAD_REQUEST",
    "ENDPOINT_NOT_FOUND",
    "INVALID_PARAMETER_VALUE",
    "INVALID_STATE",
    "NOT_IMPLEMENTED",
    "PERMISSION_DENIED",
    "RESOURCE_ALREADY_EXISTS",
    "RESOURCE_DOES_NOT_EXIST",
    "UNAUTHENTICATED",
}


class MlflowTracker:
    """A run of MLflow, found by a tag."""

    def __init__(self, place: str) -> None:
        """``place``: an experiment at MLflow's tracking URI; or a URI: with ``://``, or a path with a slash."""
        is_uri = "://" in place or place.startswith(("/", "./"))
        self._uri = place if is_uri else None
        self._experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", DEFAULT_EXPERIMENT) if is_uri else place
        self._client: Any = None
        self._run_id = ""

    def start(self, run: ReportedRun) -> OpenedRun:
        """Open the run (`farandole.node.ui.metrics.tracker.Tracker`)."""
        with _translated():
            self._client = MlflowClient(tracking_uri=self._uri)
            experiment = self._client.get_experiment_by_name(self._experiment)
            if experiment is None:
                experiment_id = self._client.create_experiment(self._experiment)
            else:
                experiment_id = experiment.experiment_id
            # The key has no quote that could end the text in the filter.
            known = self._client.search_runs([experiment_id], f"tags.`{TAG}` = '{run.key}'", max_results=1)
            if known:
                self._run_id = known[0].info.run_id
                self._client.update_run(self._run_id, status="RUNNING", name=run.name)
            else:
                self._run_id = self._client.create_run(
                    experiment_id, run_name=run.name, tags={TAG: run.key}
                ).info.run_id
            parameters = [Param(_allowed(name), str(value)) for name, value in run.settings.items()]
            self._client.log_batch(self._run_id, params=parameters[:_MAX_PARAMETERS])
            uri = self._client.tracking_uri
        return OpenedRun(
            f"mlflow {_without_password(uri)} {self._run_id}",
            is_new=not known,
            where=f"{_without_password(uri)}, experiment {self._experiment}",
        )

    def log(self, rounds: Sequence[RoundFigures]) -> None:
        """Send rounds."""
        metrics = [
            Metric(name, value, round(each.record.at * 1000), each.record.round)
            for each in rounds
            for name, value in each.values.items()
        ]
        with _translated():
            for begin in range(0, len(metrics), _MAX_METRICS):
                self._client.log_batch(self._run_id, metrics=metrics[begin : begin + _MAX_METRICS])

    def finish(self) -> None:
        """Mark the run as finished."""
        if self._run_id:
            with _translated():
                self._client.set_terminated(self._run_id)
            self._run_id = ""


@contextmanager
def _translated() -> Iterator[None]:
    """Raise MLflow's errors in the block as `TrackerError`."""
    try:
        yield
    except MlflowException as error:
        reason = f"mlflow: {plain(str(error))}"
        if error.error_code in _FINAL:
            raise TrackerError(reason) from error
        raise TrackerUnreachableError(reason) from error
    except OSError as error:  # such as a connection that requests could not make
        raise TrackerUnreachableError(f"mlflow: {plain(str(error))}") from error


def _allowed(name: str) -> str:
    return re.sub(r"[^\w. /-]", "_", name)


def _without_password(uri: str) -> str:
    return re.sub(r"//[^/@]*@", "//", uri)
