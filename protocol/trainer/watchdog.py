"""Detect that a trainer hangs: its process lives, but makes no progress (a driver, a lock, a disk that never answers).

The node pings the trainer, which answers when it looks for commands: between two inner steps and whenever it waits. So
an answer takes at most as long as an inner step. A trainer that is silent for many times its longest answer hangs.
Silence is counted in turns of this process, each of which counts for at most `MAX_TURN`: time in which the whole
machine stood still, or was too busy for either process, must not count as silence.
"""

from __future__ import annotations

from typing import Final

WATCH_INTERVAL: Final = 1.0
# A turn counts for at most this: a busy machine is late by as much as a turn, a frozen one by more.
MAX_TURN: Final = 2 * WATCH_INTERVAL
# Limit of silence in longest inner steps: between two of them the trainer may validate, take an outer step, and save.
HUNG_STEPS: Final = 20.0
# Limit before the first answer, while the length of an inner step is unknown: it may be an hour for the largest models
# on the slowest machines.
FIRST_SECONDS: Final = 3_600.0


class Watchdog:
    """Measures the silence of one trainer after another. ``least``: the least limit of silence, in seconds."""

    def __init__(self, least: float) -> None:
        self._least = least
        self._longest: float | None = None
        self._silent = 0.0
        self.is_asked = False
        """Whether an answer is awaited."""

    @property
    def limit(self) -> float:
        """Return the seconds of silence after which a trainer counts as hung."""
        return max(self._least, FIRST_SECONDS if self._longest is None else HUNG_STEPS * self._longest)

    @property
    def is_hung(self) -> bool:
        """Return whether the trainer hangs now."""
        return self._silent > self.limit

    def begin(self) -> None:
        """Start to watch another trainer. The longest answer of earlier trainers is kept."""
        self.is_asked, self._silent = False, 0.0

    def ask(self) -> None:
        """Note that the trainer was pinged."""
        self.is_asked, self._silent = True, 0.0

    def hear(self) -> None:
        """Note that the trainer has answered."""
        if self.is_asked:
            self._longest = max(self._longest or 0.0, self._silent)
        self.begin()

    def pass_time(self, seconds: float) -> None:
        """Note that ``seconds`` have passed."""
        if self.is_asked:
            self._silent += min(seconds, MAX_TURN)
