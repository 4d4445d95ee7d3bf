"""The held-out microbatches whose loss an origin measures."""

from __future__ import annotations

from collections import deque


class HeldOut:
    """The held-out microbatches at their origin. Each is drawn until it has come back, or was lost too often."""

    def __init__(self) -> None:
        self._draws_left: dict[int, int] = {}  # of the unfinished ones
        self._waiting: deque[int] = deque()  # the unfinished ones that are not under way

    def begin(self, num_microbatches: int, max_draws: int) -> None:
        """Start a new measurement; ignore what is under way."""
        self._draws_left = dict.fromkeys(range(num_microbatches), max_draws)
        self._waiting = deque(self._draws_left)

    @property
    def is_waiting(self) -> bool:
        """Return whether there is a microbatch to draw."""
        return bool(self._waiting)

    def next(self) -> int:
        """Return the number of the next microbatch to draw."""
        return self._waiting.popleft()

    def note_missing(self, number: int) -> None:
        """Note that the text has no microbatch ``number``, so no later one either, and draw no more."""
        self._waiting.clear()
        self._draws_left = {number: 1} if number in self._draws_left else {}

    def note_measured(self, number: int) -> None:
        """Note that the microbatch has its loss. It is not drawn again, however it ends."""
        if number in self._draws_left:
            self._draws_left[number] = 1

    def note_end(self, number: int) -> bool:
        """Note that a microbatch has ended; draw it again if it was lost. Return whether it was the last one."""
        if number not in self._draws_left:
            return False
        self._draws_left[number] -= 1
        if self._draws_left[number]:
            self._waiting.append(number)
            return False
        del self._draws_left[number]
        return not self._draws_left
