"""The trainer of a stage, as the pipeline uses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from farandole.protocol.stages.pipeline_events import Measured, RoundDrained
from farandole.protocol.trainer.trainer_messages import Command


@dataclass(frozen=True, slots=True, eq=False)
class Worker:
    """One trainer process; ``size``: bytes of one microbatch's activations, and of their gradient."""

    stage: int
    size: int
    memory: memoryview
    """Shared with the trainer: for each slot, ``size`` bytes that came in, then ``size`` bytes that go out."""
    send: Callable[[Command], None]
    report: Callable[[RoundDrained | Measured], None]

    def incoming(self, slot: int) -> memoryview:
        """Return the memory for the data that a slot receives."""
        return self.memory[2 * slot * self.size : (2 * slot + 1) * self.size]

    def outgoing(self, slot: int) -> memoryview:
        """Return the memory of the data that a slot sends."""
        return self.memory[(2 * slot + 1) * self.size : (2 * slot + 2) * self.size]
