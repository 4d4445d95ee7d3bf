"""What a stage's trainer computes next, and what it has been given."""

from __future__ import annotations

from collections import deque

from .microbatches import Microbatch
from .trainer_messages import Job

# Work given to the trainer at once: one it does, one that waits, so that it never waits for us.
MAX_JOBS = 2
# What frees memory comes first. Forward passes, and draws after them, as the inner step allows.
_PRIORITIES: tuple[Job, ...] = ("backward", "tail", "keep", "drop", "forward")


class MicrobatchJobs:
    """Jobs that wait, and those that the trainer has, which it does in order."""

    def __init__(self) -> None:
        self.given: deque[tuple[Job, Microbatch]] = deque()
        """The oldest first."""
        self._waiting: dict[Job, deque[Microbatch]] = {job: deque() for job in _PRIORITIES}

    @property
    def has_room(self) -> bool:
        """Whether the trainer may be given another job."""
        return len(self.given) < MAX_JOBS

    def add(self, job: Job, microbatch: Microbatch) -> None:
        """Let a job wait for its turn."""
        self._waiting[job].append(microbatch)

    def take(self, *, may_begin: bool) -> tuple[Job, Microbatch] | None:
        """The most urgent job that waits, which waits no more.

        Unless ``may_begin``, no forward pass but of what is held out.
        """
        for job, waiting in self._waiting.items():
            may_do = job != "forward" or may_begin
            microbatch = next((each for each in waiting if may_do or each.is_held_out), None)
            if microbatch is not None:
                waiting.remove(microbatch)
                return job, microbatch
        return None

    def give(self, job: Job, microbatch: Microbatch) -> None:
        """The trainer has a job."""
        microbatch.is_working = True
        self.given.append((job, microbatch))

    def done(self) -> tuple[Job, Microbatch]:
        """The trainer's oldest job, which is done."""
        job, microbatch = self.given.popleft()
        microbatch.is_working = False
        return job, microbatch

    def discard(self, microbatch: Microbatch) -> None:
        """Nothing that waits for this microbatch is to be done."""
        for waiting in self._waiting.values():
            if microbatch in waiting:
                waiting.remove(microbatch)
