"""Bounds on peers: what is remembered of them, how often they may come, and when they are tried again.

Any number of keys may come, so whatever is kept by key is a `Latest`. `TokenBucket` limits a burst and a mean rate, and
`Backoff` pauses between attempts: they grow with each failure, and a new path is tried at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Latest(dict[Key, Value]):
    """A dict of at most ``most`` items, the one that was set last at the end; the oldest makes room."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        """Set an item, and forget the oldest if there are too many. `setdefault` and `update` do not come here."""
        self.pop(key, None)
        super().__setitem__(key, value)
        while len(self) > self._most:
            del self[next(iter(self))]


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


# More than any node meets in the time of the longest pause; a forgotten peer is tried again.
MAX_PEERS = 1_024


def pauses(first: float, longest: float, rng: Random) -> Iterator[float]:
    """Yield seconds between attempts, without end: doubling up to ``longest``, with a random factor of 0.5 to 1.5.

    So nodes that lost the same peer at the same moment come back at different moments.
    """
    pause = first
    while True:
        yield pause * rng.uniform(0.5, 1.5)
        pause = min(2 * pause, longest)


class Backoff:
    """Backoff of many peers. A path is whatever an attempt depends on; a new path makes earlier failures void."""

    def __init__(self, first: float, longest: float, max_peers: int = MAX_PEERS) -> None:
        """``first``: seconds to pause after the first failure; they double with each further one up to ``longest``."""
        self._first = first
        self._longest = longest
        self._failures = Latest[bytes, tuple[Sequence[str], float, float]](max_peers)
        """Peer -> the path, the pause after its last failure, and the end of that."""

    def is_due(self, peer: bytes, now: float, path: Sequence[str] = ()) -> bool:
        """Return whether an attempt is due."""
        return not self.has_failed(peer, path) or self._failures[peer][2] <= now

    def has_failed(self, peer: bytes, path: Sequence[str] = ()) -> bool:
        """Return whether the last attempt on this path failed, at any time."""
        return peer in self._failures and self._failures[peer][0] == tuple(path)

    def note_failure(self, peer: bytes, now: float, path: Sequence[str] = ()) -> float:
        """Record a failure; return the seconds until the next attempt."""
        pause = min(2 * self._failures[peer][1], self._longest) if self.has_failed(peer, path) else self._first
        self._failures[peer] = tuple(path), pause, now + pause
        return pause

    def note_success(self, peer: bytes) -> None:
        """Forget the failures."""
        self._failures.pop(peer, None)
