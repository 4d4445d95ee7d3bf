"""Queue of a stage's trainer: the jobs it has been given, and the ones that wait."""

from __future__ import annotations

from collections import deque

from ..trainer.trainer_messages import Job
from .microbatches import Microbatch

# Jobs that the trainer has at once: one under way, and one that waits, so that the trainer is never idle.
MAX_JOBS = 2
# Jobs that free memory come first. Forward passes, and draws after them, run as the inner step allows.
_PRIORITIES: tuple[Job, ...] = ("backward", "tail", "forward")


class MicrobatchJobs:
    """The jobs that wait, and the jobs that the trainer has, which it does in order."""

    def __init__(self) -> None:
        self.given: deque[tuple[Job, Microbatch]] = deque()
        """The oldest first."""
        self._waiting: dict[Job, deque[Microbatch]] = {job: deque() for job in _PRIORITIES}

    @property
    def has_room(self) -> bool:
        """Return whether the trainer may be given another job."""
        return len(self.given) < MAX_JOBS

    def add(self, job: Job, microbatch: Microbatch) -> None:
        """Add a job to the ones that wait."""
        self._waiting[job].append(microbatch)

    def take(self, *, may_begin: bool) -> tuple[Job, Microbatch] | None:
        """Remove the most urgent waiting job, and return it.

        Unless ``may_begin``, the only forward passes are of held-out microbatches.
        """
        for job, waiting in self._waiting.items():
            may_do = job != "forward" or may_begin
            microbatch = next((each for each in waiting if may_do or each.is_held_out), None)
            if microbatch is not None:
                waiting.remove(microbatch)
                return job, microbatch
        return None

    def give(self, job: Job, microbatch: Microbatch) -> None:
        """Note that the trainer has been given a job."""
        microbatch.is_working = True
        self.given.append((job, microbatch))

    def done(self) -> tuple[Job, Microbatch]:
        """Note that the trainer's oldest job is done, and return it."""
        job, microbatch = self.given.popleft()
        microbatch.is_working = False
        return job, microbatch

    def discard(self, microbatch: Microbatch) -> None:
        """Discard the waiting jobs of a microbatch."""
        for waiting in self._waiting.values():
            if microbatch in waiting:
                waiting.remove(microbatch)
