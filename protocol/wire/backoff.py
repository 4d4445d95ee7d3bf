"""Backoff per peer: pauses between attempts grow with each failure, and a new path is tried at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from .latest import Latest

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
