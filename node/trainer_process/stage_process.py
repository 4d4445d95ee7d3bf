"""The trainer of a stage: it computes what it is told for microbatches, and steps when it is told.

What is computed when, the mesh process decides (`farandole.protocol.pipeline`); activations lie in shared memory, in
two places for each slot: what came in, and what goes out.
"""

from __future__ import annotations

import time

from farandole.protocol.manifest import Manifest
from farandole.protocol.trainer_messages import (
    InnerStepTaken,
    Prepare,
    TakeInnerStep,
    Train,
    Validate,
    Validated,
    Work,
    Worked,
)
from farandole.training.errors import ActivationError, DataError, NoSliceError
from farandole.training.stage_worker import StageWorker, build_stage_worker

from ..base.system.memory import map_shared_memory
from ..trainer.channel import TrainerSocket
from .inputs import bring_of
from .process import TrainerProcess


class StageProcess(TrainerProcess):
    """Owns a `StageWorker`."""

    def __init__(self, channel: TrainerSocket, prepare: Prepare, manifest: Manifest) -> None:
        self._worker: StageWorker = build_stage_worker(
            manifest,
            stage=prepare.stage,
            run_id=prepare.run_id,
            author=prepare.author,
            device=prepare.device,
            bring=bring_of(prepare, channel),
            allowed_models=prepare.allowed_models,
        )
        self._activation_bytes = size = self._worker.activation_bytes
        self._memory = memoryview(map_shared_memory(prepare.activations, 2 * manifest.pipeline.in_flight * size))
        self._losses: list[float] = []
        super().__init__(channel, prepare, self._worker, size)

    def _take_inner_steps(self, command: Train) -> tuple[int, float | None]:
        steps = 0
        self._losses = []
        while True:
            told = self._await_command()
            started_at = time.monotonic()
            match told:
                case Work():
                    problem = self._work(told)
                    self._spend(started_at)
                    if told.work == "keep" or problem:
                        self._report_slices()
                    self._channel.send(Worked(problem))
                case TakeInnerStep():
                    is_taken = self._worker.step()
                    steps += is_taken
                    self._spend(started_at)
                    self._channel.send(InnerStepTaken(is_taken))
                    self._report_progress(steps, self._mean_loss)
                case Validate(num_batches):
                    self._channel.send(self._validate(num_batches))
                case _ if self._obey(told, command.round):
                    break
        return steps, self._mean_loss()

    def _spend(self, started_at: float) -> None:
        """A slow node computes, and then sleeps."""
        time.sleep((self._slow - 1.0) * (time.monotonic() - started_at))
        self._busy_seconds += time.monotonic() - started_at

    def _mean_loss(self) -> float | None:
        """Of the round so far; stage 0 alone knows losses."""
        return sum(self._losses) / len(self._losses) if self._losses else None

    def _work(self, told: Work) -> str:
        """Why it came to nothing, or nothing."""
        first, worker = 2 * told.slot * self._activation_bytes, self._worker
        middle = first + self._activation_bytes
        incoming, outgoing = self._memory[first:middle], self._memory[middle : middle + self._activation_bytes]
        try:
            match told.work:
                case "draw" if told.is_held_out:
                    worker.draw_held_out(told.slot, outgoing, told.number)
                case "draw":
                    worker.draw(told.slot, outgoing, is_following=told.is_following)
                case "forward":
                    worker.forward(
                        told.slot,
                        incoming,
                        outgoing,
                        is_following=told.is_following,
                        is_held_out=told.is_held_out,
                    )
                case "tail":
                    loss = float(worker.tail(told.slot, incoming, outgoing))
                    if not told.is_held_out:
                        self._losses.append(loss)
                case "backward":
                    worker.backward(told.slot, incoming, outgoing)
                case "keep" | "drop":
                    worker.settle(told.slot, told.work == "keep")
        except (ActivationError, NoSliceError, DataError) as error:
            return str(error)
        return ""

    def _validate(self, num_batches: int) -> Validated:
        """Of what has gone through the stages since it was last asked."""
        try:
            return Validated(self._worker.round, self._worker.validation_loss(num_batches))
        except DataError as error:
            return Validated(self._worker.round, 0.0, f"no validation: {error}")
