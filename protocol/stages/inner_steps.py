"""Schedule of inner steps: the step that a microbatch is for, when a step is taken, and when the round is over.

Each node takes inner steps on its own. When it has begun its quota of microbatches, it begins no more until all of them
have ended, and then steps. So a microbatch meets the same weights in its forward and backward pass.

**Overlap.** Waiting for the last microbatches leaves a node idle in every step, for as long as a microbatch takes. With
``overlap`` the node begins the *following* step's microbatches while it waits, with the weights from before the step,
which the trainer keeps for their backward passes. Their gradients are one step late (as all are in PipeDream-2BW, arXiv
2006.09503, section 3.1). A round that the next one follows at once ends with the step that is under way, and keeps what
was begun for the following step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .pipeline_events import PipelineSettings, RoundBegan

# Time for a round's last microbatches to end; half of it for them to arrive here. Where the next round's microbatches
# begin during this time, the limit is twice the duration of the slowest recent one, if that is more.
DRAIN_SECONDS = 5.0
# Number of recent arrivals that show the age of arriving microbatches, and of recent ends that show their duration.
NUM_AGES = 32

Move = Literal["step", "drained", "next"]
"""``step``: take the inner step. ``drained``: the round is over. ``next``: this step kept nothing, so skip it."""


@dataclass(slots=True, eq=False)
class InnerStep:
    """Counts of the microbatches of one inner step."""

    num_begun: int = 0
    num_open: int = 0
    """Begun microbatches of which the trainer still holds something."""
    num_kept: int = 0
    until: float = math.inf
    """Time from which no more are begun for it."""


class Schedule:
    """One node's schedule. ``quota``: microbatches of an inner step now; ``num_coming``: coming, not yet begun here."""

    def __init__(self, settings: PipelineSettings, *, quota: Callable[[], int], num_coming: Callable[[], int]) -> None:
        self.round = 0
        self.is_open = False
        """True from the beginning of a round until it is drained."""
        self.current, self.following = InnerStep(), InnerStep()
        self.drain_until = math.inf
        """Time at which microbatches under way are dropped, at the end of a round."""
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
        """Begin a round: microbatches may be begun."""
        self.round, self.is_open, self._is_ending = event.round, True, False
        self._steps_left, self._is_followed = event.max_steps or math.inf, event.is_followed and self._settings.overlap
        self._begin_until = math.inf

    def end_round(self, now: float) -> None:
        """End the round: its time is up, or its steps are taken."""
        if self.is_open and not self._is_ending:
            self._is_ending = True
            drain = DRAIN_SECONDS
            if self._is_followed:
                drain = max(drain, 2 * max(self._durations, default=0.0))
            drain = min(drain, self._settings.microbatch_seconds)
            self._begin_until = now if self._settings.stage == 0 else now + drain / 2
            self.drain_until = now + drain

    def is_draining_over(self, now: float) -> bool:
        """Return whether the time for this round's microbatches under way is up."""
        return now >= self.drain_until and not self._is_stepping

    def is_of_round(self, inner_step: InnerStep | None) -> bool:
        """Return whether ``inner_step`` is taken before the round ends."""
        return inner_step is self.current or not self._is_followed

    def _is_over(self, now: float) -> bool:
        """Return whether no more microbatches are begun for this round's steps.

        In an ending round, an origin stops at once. A later stage stops when the microbatches that origins have begun
        have arrived. If the next round follows at once, every stage stops: later microbatches may be for that round.
        """
        if not self._is_ending or self._is_followed or now >= self._begin_until:
            return self._is_ending
        return now >= self._quiet_at and not self._num_coming()

    @property
    def _quiet_at(self) -> float:
        """Time by which all microbatches should have arrived: twice the largest recent age after the last arrival."""
        return self._arrived_at + 2 * max(self._ages, default=0.0)

    # Microbatches

    def may_begin(self, now: float) -> bool:
        """Return whether a microbatch may be begun."""
        return self._begins_for(now) is not None

    def begin(self, now: float) -> InnerStep:
        """Begin a microbatch, and return the inner step that it is for. Call `may_begin` first."""
        inner_step = self._begins_for(now)
        assert inner_step is not None, "it was asked before"
        inner_step.num_begun += 1
        inner_step.num_open += 1
        inner_step.until = min(inner_step.until, now + self._settings.microbatch_seconds)
        return inner_step

    def note_arrival(self, age: float, now: float) -> None:
        """Note that a microbatch begins to arrive, ``age`` seconds after it was drawn."""
        self._ages.append(age)
        self._arrived_at = now

    def note_end(self, seconds: float) -> None:
        """Note that a microbatch is kept, ``seconds`` after it was begun here."""
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
        """Make the move that is due when the current step has nothing under way, and return it; None if none is due."""
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
        """Note that the step is taken, and return whether that ends the round."""
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
        """Times at which a move may be due."""
        return [self._begin_until, self._quiet_at, self.drain_until, self.current.until, self.following.until]
