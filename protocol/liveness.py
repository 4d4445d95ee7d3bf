"""Who lives: a peer whose heartbeat has advanced within three periods of *my* monotonic clock.

Neither the peer's clock nor the network's delay can make a dead peer look alive: an old heartbeat does not advance.
A heartbeat proves that somebody has a key, no more: one process may send those of thousands. So a peer is *present*,
and counts when this node decides something, once this node has reached it as well: has had a connection with it, on
which it proved its key, since it was found unreachable last.

A heartbeat costs everybody its bytes, so the period grows with the run: T = max(base, N / 33) seconds, which keeps a
node's share of all heartbeats below 33 a second, 4 kB/s; by push each comes 2.3 times, and with all else that a run of
1,000 says a node sends less than 20 kB/s (`testnet/simulate_state.py`).
"""

from __future__ import annotations

from collections.abc import Container

BASE_PERIOD = 10.0
PEERS_A_SECOND = 33.0
PERIODS_OF_SILENCE = 3.0
SUSPICION_SECONDS = 5.0
"""A heartbeat that comes this soon after a suspicion may have been on its way since before."""


class Liveness:
    """Judges the peers by their heartbeats. ``now`` is this node's monotonic clock, seconds."""

    def __init__(self, base_period: float = BASE_PERIOD) -> None:
        """``base_period``: T of a small run, seconds; the same for all nodes of a run."""
        self.base_period = base_period
        self._pulses: dict[bytes, tuple[int, float]] = {}  # peer -> its newest heartbeat, and when that came
        self._suspected: dict[bytes, float] = {}  # peer -> since when
        self._reached: set[bytes] = set()  # of those that have beaten

    @property
    def period(self) -> float:
        """T, seconds between heartbeats, in a run of as many nodes as are known to have beaten of late."""
        return max(self.base_period, (len(self._pulses) + 1) / PEERS_A_SECOND)

    @property
    def silence(self) -> float:
        """Seconds without a heartbeat after which a peer counts as dead."""
        return PERIODS_OF_SILENCE * self.period

    def beat(self, peer: bytes, tick: int, now: float) -> None:
        """A heartbeat has come, first-hand or not; one that is not newer says nothing."""
        if peer not in self._pulses or tick > self._pulses[peer][0]:
            self._pulses[peer] = tick, now
            if now - self._suspected.get(peer, now) >= SUSPICION_SECONDS:
                self._suspected.pop(peer, None)

    def suspect(self, peer: bytes, now: float) -> None:
        """It could not be reached: taken for dead until it beats again, and not present until it is reached."""
        if peer in self._pulses:
            self._suspected[peer] = now
            self._reached.discard(peer)

    def trust(self, peer: bytes) -> None:
        """It was reached; of a peer that has not beaten yet that is not remembered."""
        self._suspected.pop(peer, None)
        if peer in self._pulses:
            self._reached.add(peer)

    def is_live(self, peer: bytes, now: float) -> bool:
        """Whether its heartbeat has advanced lately."""
        return peer in self._pulses and now - self._pulses[peer][1] <= self.silence

    def seconds_since(self, peer: bytes, now: float) -> float | None:
        """Since its heartbeat last advanced; None if none ever came."""
        return now - self._pulses[peer][1] if peer in self._pulses else None

    def is_suspect(self, peer: bytes) -> bool:
        """Whether it was found unreachable, and has not been heard of since."""
        return peer in self._suspected

    def live(self, now: float) -> list[bytes]:
        """Everybody who lives, this node left out."""
        limit = self.silence
        return [peer for peer, (_, advanced_at) in self._pulses.items() if now - advanced_at <= limit]

    def is_reached(self, peer: bytes) -> bool:
        """Whether it was reached, and has not been found unreachable since."""
        return peer in self._reached

    def present(self, now: float) -> set[bytes]:
        """Everybody who lives and was reached."""
        return self._reached.intersection(self.live(now))

    def forget_all_but(self, peers: Container[bytes]) -> None:
        """Forget the others. A peer may be forgotten once its last heartbeat has expired, not before.

        (A heartbeat that is heard again after that would else make it look alive.)
        """
        self._pulses = {peer: pulse for peer, pulse in self._pulses.items() if peer in peers}
        self._suspected = {peer: since for peer, since in self._suspected.items() if peer in peers}
        self._reached = {peer for peer in self._reached if peer in peers}
