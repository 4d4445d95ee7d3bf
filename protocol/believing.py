"""Whose word on how far the run is counts: that of peers with whom exchanges were committed, unless it proved vain.

A heartbeat says a round, and any key can say any round. An exchange that was committed is work: both sides judged the
other's weights. So the *partners* of a node, those with whom it has committed exchanges, say for it where the run is,
and a claim of others never makes it stop its trainer. Only a node that starts a trainer and has no partner present
believes the members that it has reached, since nothing else is to be had.

A claim is put to the test when weights are fetched for it. If none come, or they are judged unfit, the peers that made
the claim, or gave the weights, lose their credit: they are not believed for a while, for longer each time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from .identity import PUBLIC_KEY_BYTES

# Rounds by which a claim may differ from what is known, and be taken as it is: heartbeats are up to a minute old, and a
# trainer takes a minute to start, while rounds may take a second.
MAX_LEAP = 100
# Partners that are remembered, the latest: as many as a node meets in hours; 8 kB in its store.
MAX_PARTNERS = 256
# Seconds for which a peer is not believed after its first vain claim: several times as long as the test of a claim
# takes. Twice as long after each further one, up to a day.
FIRST_DOUBT, MAX_DOUBT = 600.0, 86_400.0
# Peers whose vain claims are remembered, the latest.
MAX_DOUBTED = 4_096


class Partners:
    """Peers with whom this node has committed exchanges, the latest last."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, peer: bytes) -> bool:
        """Whether an exchange with a peer was committed."""
        return peer in self._known

    @property
    def keys(self) -> frozenset[bytes]:
        """Public keys of all partners."""
        return frozenset(self._known)

    def note(self, peer: bytes) -> None:
        """An exchange with a peer was committed."""
        self._known[peer] = None
        self._known.move_to_end(peer)
        while len(self._known) > MAX_PARTNERS:
            self._known.popitem(last=False)

    def encode(self) -> bytes:
        """Their keys, for this node's own disk."""
        return b"".join(self._known)

    def restore(self, encoded: bytes) -> None:
        """Take up what an earlier life had encoded."""
        for start in range(0, len(encoded) - PUBLIC_KEY_BYTES + 1, PUBLIC_KEY_BYTES):
            self.note(encoded[start : start + PUBLIC_KEY_BYTES])


class Credit:
    """Which peers are believed, by how often their claims were vain. ``now`` is monotonic, in seconds."""

    def __init__(self) -> None:
        self._doubts: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # peer -> how often, and until when

    def lose(self, peers: Iterable[bytes], now: float) -> None:
        """Claims of these peers were vain. Those of peers that are doubted already are the same story."""
        for peer in peers:
            if not self.is_good(peer, now):
                continue
            number = self._doubts.get(peer, (0, 0.0))[0] + 1
            self._doubts[peer] = number, now + min(FIRST_DOUBT * 2.0 ** min(number - 1, 30), MAX_DOUBT)
            self._doubts.move_to_end(peer)
        while len(self._doubts) > MAX_DOUBTED:
            self._doubts.popitem(last=False)

    def is_good(self, peer: bytes, now: float) -> bool:
        """Whether a peer is believed."""
        return peer not in self._doubts or self._doubts[peer][1] <= now
