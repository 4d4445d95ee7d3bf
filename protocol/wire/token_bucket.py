"""Token buckets: limits on the burst size and on the mean rate."""

from __future__ import annotations

from .latest import Latest


class TokenBucket:
    """A token bucket that starts full. Time is any clock; when it is set back, the bucket fills from then on.

    Otherwise, after a clock was an hour fast for a moment, the bucket would not fill for an hour.
    """

    __slots__ = ("_at", "_tokens", "capacity", "rate")

    def __init__(self, capacity: float, rate: float, now: float) -> None:
        """``capacity`` tokens at most, ``rate`` new ones a second."""
        self.capacity = capacity
        self.rate = rate
        self._tokens = capacity
        self._at = now

    def available(self, now: float) -> float:
        """Return the tokens available at ``now``."""
        self._tokens = min(self.capacity, self._tokens + max(0.0, now - self._at) * self.rate)
        self._at = now
        return self._tokens

    def take(self, now: float, count: float = 1.0) -> bool:
        """Take ``count`` tokens if they are available; return whether they were."""
        if self.available(now) < count:
            return False
        self._tokens -= count
        return True


# More peers than any node talks to within the time in which a bucket fills.
MAX_METERED = 1_024


class PeerMeters:
    """Equal buckets, one for each peer. The oldest are forgotten first, which fills them."""

    def __init__(self, capacity: float, rate: float) -> None:
        self._capacity = capacity
        self._rate = rate
        self._buckets = Latest[bytes, TokenBucket](MAX_METERED)

    def of(self, peer: bytes, now: float) -> TokenBucket:
        """Return the peer's bucket."""
        bucket = self._buckets.get(peer)
        if bucket is None:
            bucket = self._buckets[peer] = TokenBucket(self._capacity, self._rate, now)
        return bucket
