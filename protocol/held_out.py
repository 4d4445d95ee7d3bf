"""The held-out microbatches whose loss an origin measures."""

from __future__ import annotations

from collections import deque


class HeldOut:
    """Each is drawn until it has come back, or was lost too often."""

    def __init__(self) -> None:
        self._draws_left: dict[int, int] = {}  # of those that are not done
        self._waiting: deque[int] = deque()  # of these, those that are not under way

    def begin(self, num_microbatches: int, max_draws: int) -> None:
        """Measure anew; what is under way counts no more."""
        self._draws_left = dict.fromkeys(range(num_microbatches), max_draws)
        self._waiting = deque(self._draws_left)

    @property
    def is_waiting(self) -> bool:
        """Whether one is to be drawn."""
        return bool(self._waiting)

    def next(self) -> int:
        """The number of the next one to draw."""
        return self._waiting.popleft()

    def note_missing(self, number: int) -> None:
        """There is no such text, so there is none behind it either: no more is drawn."""
        self._waiting.clear()
        self._draws_left = {number: 1} if number in self._draws_left else {}

    def note_measured(self, number: int) -> None:
        """It has its loss: it is not drawn again, however it ends."""
        if number in self._draws_left:
            self._draws_left[number] = 1

    def note_end(self, number: int) -> bool:
        """One has come to its end; if it was lost on its way, it is drawn again. Whether that was the last."""
        if number not in self._draws_left:
            return False
        self._draws_left[number] -= 1
        if self._draws_left[number]:
            self._waiting.append(number)
            return False
        del self._draws_left[number]
        return not self._draws_left
