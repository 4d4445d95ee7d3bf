"""For which inner step a node begins a microbatch, when the step is taken, and when the round is over.

Each node takes inner steps on its own: when it has begun its quota of microbatches, it begins no more until all of
those have come to their end, and steps. So a microbatch meets the same weights there and back.

**Overlap.** Waiting for the last ones leaves a node idle for as long as a microbatch is under way, in every step. With
``overlap`` the *following* step's microbatches are begun meanwhile, with the weights of before, which the trainer keeps
for their way back: their gradients are one step late (as all are in PipeDream-2BW, arXiv 2006.09503, section 3.1). A
round that is followed by the next at once ends with the step that is under way, and what has been begun for the
following one stays.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .pipeline_events import PipelineSettings, RoundBegan

# A round's last microbatches have this long to come to their end; half of it, to come here. Where the next round's are
# begun meanwhile, they have twice as long as any of late has taken, if that is more.
DRAIN_SECONDS = 5.0
# How many of the last arrivals tell how old microbatches are when they come, and of the last ends how long they take.
NUM_AGES = 32

Move = Literal["step", "drained", "next"]
"""Take the inner step; the round is over; or nothing came of this step, and the next one is begun."""


@dataclass(slots=True, eq=False)
class InnerStep:
    """What has been done for one inner step."""

    num_begun: int = 0
    num_open: int = 0
    """Of these, how many the trainer still holds something of."""
    num_kept: int = 0
    until: float = math.inf
    """From when on no more are begun for it."""


class Schedule:
    """See above. ``quota``: of microbatches in an inner step now; ``num_coming``: that have not begun here yet."""

    def __init__(self, settings: PipelineSettings, *, quota: Callable[[], int], num_coming: Callable[[], int]) -> None:
        self.round = 0
        self.is_open = False
        """Between the beginning of a round and the word that it is drained."""
        self.current, self.following = InnerStep(), InnerStep()
        self.drain_until = math.inf
        """When those that are under way are dropped, at the end of a round."""
        self._settings = settings
        self._quota = quota
        self._num_coming = num_coming
        self._is_ending = False
        self._is_followed = False
        self._is_stepping = False
        self._steps_left: float = 0
        self._begin_until = math.inf
        self._arrived_at = -math.inf
        self._ages: deque[float] = deque(maxlen=NUM_AGES)
        self._durations: deque[float] = deque(maxlen=NUM_AGES)

    # Rounds

    def begin_round(self, event: RoundBegan) -> None:
        """Microbatches may be begun."""
        self.round, self.is_open, self._is_ending = event.round, True, False
        self._steps_left, self._is_followed = event.max_steps or math.inf, event.is_followed and self._settings.overlap
        self._begin_until = math.inf

    def end_round(self, now: float) -> None:
        """The round's time is up, or its steps are taken."""
        if self.is_open and not self._is_ending:
            self._is_ending = True
            drain = DRAIN_SECONDS
            if self._is_followed:
                drain = max(drain, 2 * max(self._durations, default=0.0))
            drain = min(drain, self._settings.microbatch_seconds)
            self._begin_until = now if self._settings.stage == 0 else now + drain / 2
            self.drain_until = now + drain

    def is_draining_over(self, now: float) -> bool:
        """Whether what is under way for this round has had its time."""
        return now >= self.drain_until and not self._is_stepping

    def is_of_round(self, inner_step: InnerStep | None) -> bool:
        """Whether the round does not end before this step is taken."""
        return inner_step is self.current or not self._is_followed

    def _is_over(self, now: float) -> bool:
        """Whether no more are begun for this round's steps.

        At origins at once, later when what they have begun has come; at all if it may as well be of the next round.
        """
        if not self._is_ending or self._is_followed or now >= self._begin_until:
            return self._is_ending
        return now >= self._quiet_at and not self._num_coming()

    @property
    def _quiet_at(self) -> float:
        """When all that is on its way should have come: twice as long as any of late has taken, after the last one."""
        return self._arrived_at + 2 * max(self._ages, default=0.0)

    # Microbatches

    def may_begin(self, now: float) -> bool:
        """Whether a microbatch may be begun."""
        return self._begins_for(now) is not None

    def begin(self, now: float) -> InnerStep:
        """One is begun: the inner step that it is for. `may_begin` has been asked before."""
        inner_step = self._begins_for(now)
        assert inner_step is not None, "it was asked before"
        inner_step.num_begun += 1
        inner_step.num_open += 1
        inner_step.until = min(inner_step.until, now + self._settings.microbatch_seconds)
        return inner_step

    def note_arrival(self, age: float, now: float) -> None:
        """A microbatch begins to come, ``age`` seconds after it was drawn."""
        self._ages.append(age)
        self._arrived_at = now

    def note_end(self, seconds: float) -> None:
        """One that was begun here so long ago is kept."""
        self._durations.append(seconds)

    def _begins_for(self, now: float) -> InnerStep | None:
        if not self.is_open:
            return None
        is_over = self._is_over(now)
        if not is_over and not self.following.num_begun and self._is_wanting(self.current, now):
            return self.current
        has_following = self._settings.overlap and (self._is_followed or (not is_over and self._steps_left > 1))
        return self.following if has_following and self._is_wanting(self.following, now) else None

    def _is_wanting(self, inner_step: InnerStep, now: float) -> bool:
        return inner_step.num_begun < self._quota() and now < inner_step.until

    # Steps

    def move_on(self, now: float) -> Move | None:
        """What is due when nothing for the current step is under way any more; None if nothing is."""
        if not self.is_open or self._is_stepping or self.current.num_open or self._begins_for(now) is self.current:
            return None
        if self.current.num_kept:
            self._is_stepping = True
            self._shift()
            self._steps_left -= 1
            if self._steps_left <= 0:
                self.end_round(now)
                self._begin_until = now
            return "step"
        if self._is_over(now) and (self._is_followed or not self.following.num_begun):
            self._shift()
            self._close()
            return "drained"
        if self.current.num_begun:
            self._shift()
            return "next"
        return None

    def stepped(self, now: float) -> bool:
        """The step is taken; whether the round is over by that."""
        self._is_stepping = False
        is_over = self._is_over(now) and self._is_followed
        if is_over:
            self._close()
        return is_over

    def _shift(self) -> None:
        self.current, self.following = self.following, InnerStep()

    def _close(self) -> None:
        self.is_open = False
        self.drain_until = math.inf

    @property
    def deadlines(self) -> list[float]:
        """When something may be due."""
        return [self._begin_until, self._quiet_at, self.drain_until, self.current.until, self.following.until]
