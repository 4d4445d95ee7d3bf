"""Rounds in Weights & Biases, or in files that ``wandb sync`` sends later (``WANDB_MODE=offline``).

wandb hands all it gets to a process of its own, which writes it to a file below ``./wandb`` (``WANDB_DIR``) before it
sends it, and repeats what the server did not take. So what was logged is not lost when the server is away.

The step is the round. Steps of wandb only grow: a round that the node repeats after a crash stays as it was sent first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import wandb

from .figures import RoundFigures
from .tracker import OpenedRun, ReportedRun, TrackerError, TrackerUnreachableError, plain

# Seconds to wait for the server; wandb's own default is 90.
_START_TIMEOUT = 30.0
# Seconds until wandb's file has what was logged; its own default is 15.
_FLUSH_INTERVAL = 1.0


class WandbTracker:
    """A run of wandb, resumed by its id."""

    def __init__(self, place: str) -> None:
        """``place``: ``PROJECT`` or ``ENTITY/PROJECT``."""
        entity, _, project = place.rpartition("/")
        self._entity = entity or None
        self._project = project
        self._run: Any = None
        self._next_step = 0

    def start(self, run: ReportedRun) -> OpenedRun:
        """Open the run (`farandole.node.ui.metrics.tracker.Tracker`)."""
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
                settings=_settings(),
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


def _settings() -> Any:
    """Return settings that keep wandb from sending anything about this machine, its code and its output."""
    return wandb.Settings(
        console="off",
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        save_code=False,
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
        x_transaction_log_flush_interval=_FLUSH_INTERVAL,
        host="-",
        program="farandole",
        init_timeout=_START_TIMEOUT,
        quiet=True,
    )
