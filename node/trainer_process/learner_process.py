"""The trainer of a run whose model is not cut: inner steps one after the other, on batches of its own."""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

from farandole.protocol.manifest import Manifest
from farandole.protocol.trainer_messages import Prepare, Train, Validated
from farandole.training.errors import DataError
from farandole.training.learner import build_learner

from ..trainer.channel import TrainerSocket
from .inputs import bring_of
from .process import TrainerProcess

if TYPE_CHECKING:
    from torch import Tensor

# Inner steps by which a slow node knows how long one takes.
STEPS_REMEMBERED: Final = 16


class LearnerProcess(TrainerProcess):
    """Owns a `Learner`."""

    def __init__(self, channel: TrainerSocket, prepare: Prepare, manifest: Manifest) -> None:
        self._learner = build_learner(
            manifest,
            run_id=prepare.run_id,
            author=prepare.author,
            device=prepare.device,
            bring=bring_of(prepare, channel),
            allowed_models=prepare.allowed_models,
            microbatch_size=prepare.microbatch,
        )
        super().__init__(channel, prepare, self._learner)
        # Of the newest inner steps: the shortest is what one takes. One in the middle of which the machine slept, or
        # worked for somebody else, says nothing of how long to pause.
        self._pace = prepare.step_seconds
        self._step_seconds = deque[float](maxlen=STEPS_REMEMBERED)

    def _take_inner_steps(self, command: Train) -> tuple[int, float | None]:
        steps = 0
        losses: Tensor | float = 0.0  # their sum stays on the device: reading it would wait for the step
        is_over = False
        while not is_over and (command.max_steps == 0 or steps < command.max_steps):
            if self._is_dry:
                is_over = self._wait_for_slices(command.round)
                continue
            step_started_at = time.monotonic()
            losses = self._learner.learn() + losses
            steps += 1
            self._report_progress(steps, partial(_mean, losses, steps))
            seconds = time.monotonic() - step_started_at
            self._step_seconds.append(seconds)
            pause = max((self._slow - 1.0) * min(self._step_seconds), self._pace - seconds)
            self._busy_seconds += seconds + pause
            is_over = self._is_round_over(command.round, step_started_at + seconds + pause)
        return steps, _mean(losses, steps) if steps else None

    @property
    def _is_dry(self) -> bool:
        slices = self._learner.slices
        return slices is not None and not slices.has_more

    def _wait_for_slices(self, round_index: int) -> bool:
        """Until there is something to learn from, or the round ends; whether that."""
        self._report_slices()
        while self._is_dry:
            if self._obey(self._await_command(), round_index):
                return True
        return False

    def _is_round_over(self, round_index: int, pause_until: float) -> bool:
        """Between two inner steps: obey what has come and what comes during the pause; whether the round ends."""
        self._take_in()
        while (command := self._channel.poll(max(0.0, pause_until - time.monotonic()))) is not None:
            if self._obey(command, round_index):
                return True
        return False

    def _validate(self, num_batches: int) -> Validated:
        """Too little text held out costs a warning, never the training."""
        try:
            return Validated(self._learner.round, self._learner.validation_loss(num_batches))
        except DataError as error:
            return Validated(self._learner.round, 0.0, f"no validation: {error}")


def _mean(losses: Tensor | float, steps: int) -> float:
    return float(losses) / steps
