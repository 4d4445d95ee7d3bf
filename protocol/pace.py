"""How fast a node trains."""

from __future__ import annotations

# Over how long a node's pace is taken: several rounds, with the exchanges between them.
PACE_SECONDS = 240.0


class Pace:
    """How fast this node trains, over the last minutes in which it had something to train on."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._count = 0.0
        self._since: float | None = None

    @property
    def slices_per_second(self) -> float | None:
        """None: not known yet."""
        return self._count / self._seconds if self._count and self._seconds else None

    def go_on(self, now: float) -> None:
        """There is something to train on."""
        if self._since is None:
            self._since = now

    def pause(self) -> None:
        """There is nothing."""
        self._since = None

    def note(self, count: int, now: float) -> None:
        """So many slices more; the time since the last ones is theirs."""
        if self._since is None:
            return
        self._seconds += now - self._since
        self._count += count
        self._since = now
        if self._seconds > PACE_SECONDS:  # the older half counts half
            self._seconds, self._count = self._seconds / 2, self._count / 2
