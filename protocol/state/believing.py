"""The peers that a node believes about the run's progress: its partners, unless their claims proved false.

A heartbeat names a round, and any key can name any round. A committed exchange is work: both sides judged the other's
weights. So a node takes the run's progress from its *partners*, the peers with which it has committed exchanges, and a
claim of other peers never makes it stop its trainer. Only a node that starts a trainer while no partner is present
believes the members that it has reached, since it has no other source.

A claim is tested when weights are fetched for it. If none arrive, or they are judged unfit, the peers that made the
claim, or gave the weights, lose their credit: they are not believed for a while, and for longer each time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from ..wire.identity import PUBLIC_KEY_BYTES

# Rounds by which a claim may differ from what is known and still be accepted without a test: heartbeats are up to a
# minute old, and a trainer takes a minute to start, while rounds may take a second.
MAX_LEAP = 100
# The latest partners that are remembered: as many as a node meets in hours; 8 kB in its store.
MAX_PARTNERS = 256
# Seconds for which a peer is not believed after its first false claim: several times as long as the test of a claim
# takes. Twice as long after each further one, up to a day.
FIRST_DOUBT, MAX_DOUBT = 600.0, 86_400.0
# The latest peers whose false claims are remembered.
MAX_DOUBTED = 4_096


class Partners:
    """Peers with which this node has committed exchanges, the latest last."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, peer: bytes) -> bool:
        """Return whether an exchange with a peer was committed."""
        return peer in self._known

    @property
    def keys(self) -> frozenset[bytes]:
        """Return the public keys of all partners."""
        return frozenset(self._known)

    def note(self, peer: bytes) -> None:
        """Note that an exchange with a peer was committed."""
        self._known[peer] = None
        self._known.move_to_end(peer)
        while len(self._known) > MAX_PARTNERS:
            self._known.popitem(last=False)

    def encode(self) -> bytes:
        """Encode the partners' keys for this node's own disk."""
        return b"".join(self._known)

    def restore(self, encoded: bytes) -> None:
        """Add the partners that `encode` wrote in an earlier process."""
        for start in range(0, len(encoded) - PUBLIC_KEY_BYTES + 1, PUBLIC_KEY_BYTES):
            self.note(encoded[start : start + PUBLIC_KEY_BYTES])


class Credit:
    """A record of which peers are believed, by their number of false claims. ``now`` is monotonic, in seconds."""

    def __init__(self) -> None:
        self._doubts: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # peer -> how often, and until when

    def lose(self, peers: Iterable[bytes], now: float) -> None:
        """Note a false claim of each peer. A peer that is doubted already is skipped: this is the same claim again."""
        for peer in peers:
            if not self.is_good(peer, now):
                continue
            number = self._doubts.get(peer, (0, 0.0))[0] + 1
            self._doubts[peer] = number, now + min(FIRST_DOUBT * 2.0 ** min(number - 1, 30), MAX_DOUBT)
            self._doubts.move_to_end(peer)
        while len(self._doubts) > MAX_DOUBTED:
            self._doubts.popitem(last=False)

    def is_good(self, peer: bytes, now: float) -> bool:
        """Return whether a peer is believed."""
        return peer not in self._doubts or self._doubts[peer][1] <= now
