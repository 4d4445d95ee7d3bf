"""Liveness of peers: a peer is live if its heartbeat has advanced within three periods of *my* monotonic clock.

Neither the peer's clock nor the network's delay can make a dead peer look alive: an old heartbeat does not advance.
A heartbeat only proves that a process has a key, and one process may send heartbeats of thousands of keys. So a peer is
*present*, and counts in this node's decisions, only if this node has also reached it: it has had a connection with the
peer, on which the peer proved its key, since the peer was last found unreachable.

A heartbeat costs every node its bytes, so the period grows with the run: T = max(base, N / 33) seconds, which keeps a
node's share of all heartbeats below 33 a second, 4 kB/s. By push each heartbeat arrives 1.5 times. With all other
traffic of a run of 1,000, a node sends less than 20 kB/s (`testnet/simulate/state.py`).
"""

from __future__ import annotations

from collections.abc import Container

BASE_PERIOD = 10.0
PEERS_A_SECOND = 33.0
PERIODS_OF_SILENCE = 3.0
SUSPICION_SECONDS = 5.0
"""A heartbeat that arrives this soon after a suspicion may have been sent before it."""


class Liveness:
    """Judges the peers by their heartbeats. ``now`` is this node's monotonic clock, seconds."""

    def __init__(self, base_period: float = BASE_PERIOD) -> None:
        """``base_period``: T of a small run, seconds; the same for all nodes of a run."""
        self.base_period = base_period
        self._pulses: dict[bytes, tuple[int, float]] = {}  # peer -> its newest heartbeat, and when that arrived
        self._suspected: dict[bytes, float] = {}  # peer -> since when
        self._reached: set[bytes] = set()  # peers in _pulses

    @property
    def period(self) -> float:
        """T, seconds between heartbeats, for the number of nodes whose heartbeats were received recently."""
        return max(self.base_period, (len(self._pulses) + 1) / PEERS_A_SECOND)

    @property
    def silence(self) -> float:
        """Seconds without a heartbeat after which a peer counts as dead."""
        return PERIODS_OF_SILENCE * self.period

    def beat(self, peer: bytes, tick: int, now: float) -> None:
        """Note a heartbeat, first-hand or not. One that is not newer has no effect."""
        if peer not in self._pulses or tick > self._pulses[peer][0]:
            self._pulses[peer] = tick, now
            if now - self._suspected.get(peer, now) >= SUSPICION_SECONDS:
                self._suspected.pop(peer, None)

    def suspect(self, peer: bytes, now: float) -> None:
        """Note that a peer was unreachable: suspect until it beats again, not present until it is reached."""
        if peer in self._pulses:
            self._suspected[peer] = now
            self._reached.discard(peer)

    def trust(self, peer: bytes) -> None:
        """Note that a peer was reached. This is not remembered of a peer that has not sent a heartbeat yet."""
        self._suspected.pop(peer, None)
        if peer in self._pulses:
            self._reached.add(peer)

    def is_live(self, peer: bytes, now: float) -> bool:
        """Return whether a peer's heartbeat has advanced within `silence` seconds."""
        return peer in self._pulses and now - self._pulses[peer][1] <= self.silence

    def seconds_since(self, peer: bytes, now: float) -> float | None:
        """Return the seconds since a peer's heartbeat last advanced; None if none ever arrived."""
        return now - self._pulses[peer][1] if peer in self._pulses else None

    def is_suspect(self, peer: bytes) -> bool:
        """Return whether a peer was found unreachable, and has not been heard of since."""
        return peer in self._suspected

    def live(self, now: float) -> list[bytes]:
        """Return the live peers, without this node."""
        limit = self.silence
        return [peer for peer, (_, advanced_at) in self._pulses.items() if now - advanced_at <= limit]

    def is_reached(self, peer: bytes) -> bool:
        """Return whether a peer was reached, and has not been found unreachable since."""
        return peer in self._reached

    def present(self, now: float) -> set[bytes]:
        """Return the live peers that were reached."""
        return self._reached.intersection(self.live(now))

    def forget_all_but(self, peers: Container[bytes]) -> None:
        """Forget all peers except ``peers``. A peer must not be forgotten before its last heartbeat has expired.

        Otherwise that heartbeat, received again, would make the peer look alive.
        """
        self._pulses = {peer: pulse for peer, pulse in self._pulses.items() if peer in peers}
        self._suspected = {peer: since for peer, since in self._suspected.items() if peer in peers}
        self._reached = {peer for peer in self._reached if peer in peers}
