"""A token bucket: so many at once, so many a second in the long run."""

from __future__ import annotations


class TokenBucket:
    """Starts full. Time is any clock that does not run backwards; if it does, nothing is refilled."""

    __slots__ = ("_at", "_tokens", "capacity", "rate")

    def __init__(self, capacity: float, rate: float, now: float) -> None:
        """``capacity`` tokens at most, ``rate`` new ones a second."""
        self.capacity = capacity
        self.rate = rate
        self._tokens = capacity
        self._at = now

    def available(self, now: float) -> float:
        """Tokens there are at ``now``."""
        if now > self._at:
            self._tokens = min(self.capacity, self._tokens + (now - self._at) * self.rate)
            self._at = now
        return self._tokens

    def take(self, now: float, count: float = 1.0) -> bool:
        """Take that many if there are as many; returns whether it did."""
        if self.available(now) < count:
            return False
        self._tokens -= count
        return True
