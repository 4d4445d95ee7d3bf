"""Backoff per peer: pauses between attempts grow with each failure, and a new path is tried at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from farandole.protocol.wire.latest import Latest

# More than any node meets in the time of the longest pause; a forgotten peer is tried again.
MAX_PEERS: Final = 1_024


@dataclass(frozen=True, slots=True)
class _Failures:
    """One peer's failures in a row."""

    path: tuple[str, ...]
    count: int
    pause: float
    due_at: float


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

    def __init__(self, first: float, longest: float) -> None:
        """``first``: seconds to pause after the first failure; they double with each further one up to ``longest``."""
        self._first = first
        self._longest = longest
        self._failures: Latest[bytes, _Failures] = Latest(MAX_PEERS)

    def is_due(self, peer: bytes, path: Sequence[str], now: float) -> bool:
        """Return whether an attempt is due."""
        failures = self._of(peer, path)
        return failures is None or failures.due_at <= now

    def has_failed(self, peer: bytes, path: Sequence[str]) -> bool:
        """Return whether the last attempt on this path failed, at any time."""
        return self._of(peer, path) is not None

    def note_failure(self, peer: bytes, path: Sequence[str], now: float) -> tuple[int, float]:
        """Record a failure; return the number of failures in a row, and the seconds until the next attempt."""
        before = self._of(peer, path)
        count = before.count + 1 if before else 1
        pause = min(2 * before.pause, self._longest) if before else self._first
        self._failures[peer] = _Failures(tuple(path), count, pause, now + pause)
        return count, pause

    def note_success(self, peer: bytes) -> None:
        """Forget the failures."""
        self._failures.pop(peer, None)

    def _of(self, peer: bytes, path: Sequence[str]) -> _Failures | None:
        failures = self._failures.get(peer)
        return failures if failures is not None and failures.path == tuple(path) else None
