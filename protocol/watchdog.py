"""Whether a trainer hangs: it lives, and does nothing any more (a driver, a lock, a disk that never answers).

It is asked for a sign of life, and answers when it looks for commands, which it does between two inner steps and
whenever it waits. So how long answers take is at most how long its inner steps do, and the longest is the measure: who
is silent for many times as long hangs. Silence is counted in turns of this process' own, none of which counts for more
than it should have taken: when the whole machine stood still, or had no time for either process, that is nobody's
fault.
"""

from __future__ import annotations

from typing import Final

WATCH_INTERVAL: Final = 1.0
# What a turn counts at most: a busy machine is late by as much as a turn, a frozen one by more.
MAX_TURN: Final = 2 * WATCH_INTERVAL
# So many of its longest inner steps: between two of them it may also validate, take an outer step, and save.
HUNG_STEPS: Final = 20.0
# Before the first answer nobody knows how long an inner step takes: the largest models on the slowest machines an hour.
FIRST_SECONDS: Final = 3_600.0


class Watchdog:
    """Counts one trainer's silence after another's. ``least``: seconds, below which no silence means anything."""

    def __init__(self, least: float) -> None:
        self._least = least
        self._longest: float | None = None
        self._silent = 0.0
        self.is_asked = False
        """Whether an answer is awaited."""

    @property
    def limit(self) -> float:
        """Seconds of silence after which a trainer hangs."""
        return max(self._least, FIRST_SECONDS if self._longest is None else HUNG_STEPS * self._longest)

    @property
    def is_hung(self) -> bool:
        """Whether it does now."""
        return self._silent > self.limit

    def begin(self) -> None:
        """Another trainer. What is known of inner steps stays."""
        self.is_asked, self._silent = False, 0.0

    def ask(self) -> None:
        """The trainer is asked for a sign of life."""
        self.is_asked, self._silent = True, 0.0

    def hear(self) -> None:
        """It has given one."""
        if self.is_asked:
            self._longest = max(self._longest or 0.0, self._silent)
        self.begin()

    def pass_time(self, seconds: float) -> None:
        """So much time went by."""
        if self.is_asked:
            self._silent += min(seconds, MAX_TURN)
