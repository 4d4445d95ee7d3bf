"""Measure a node's training speed."""

from __future__ import annotations

# A node's pace is measured over this time: several rounds, with the exchanges between them.
PACE_SECONDS = 240.0


class Pace:
    """Measures how fast this node trains, over the last minutes in which it had data."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._count = 0.0
        self._since: float | None = None

    @property
    def slices_per_second(self) -> float | None:
        """Return the pace; None while it is unknown."""
        return self._count / self._seconds if self._count and self._seconds else None

    def go_on(self, now: float) -> None:
        """Start or continue the clock: there is data to train on."""
        if self._since is None:
            self._since = now

    def pause(self) -> None:
        """Stop the clock: there is no data."""
        self._since = None

    def note(self, count: int, now: float) -> None:
        """Count ``count`` slices, trained on since the last call."""
        if self._since is None:
            return
        self._seconds += now - self._since
        self._count += count
        self._since = now
        if self._seconds > PACE_SECONDS:  # the older half counts half
            self._seconds, self._count = self._seconds / 2, self._count / 2
