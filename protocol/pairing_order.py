"""The order in which a node asks its live peers: by turn (`MeetingLimit`), those with failed exchanges last."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Set

from .pairing_backoff import MeetingLimit, PartnerBackoff


class PeerOrder:
    """The live peers of a node, in the order in which they are asked in this round."""

    def __init__(self, own: bytes) -> None:
        """``own``: the node's public key."""
        self.peers: frozenset[bytes] = frozenset()
        """The live peers, without this node."""
        self._own = own
        self._round = -1
        self._backoff = PartnerBackoff()
        self._meetings = MeetingLimit(own)

    def begin(self, round_: int) -> None:
        """Begin a round; the first one counts."""
        self._round = round_
        self._meetings.begin(round_)

    def set_peers(self, peers: frozenset[bytes]) -> None:
        """Replace the live peers."""
        self.peers = peers - {self._own}

    def tier(self, peer: bytes) -> float:
        """Return a peer's tier: lower tiers are met first, and peers with failed exchanges last."""
        if self._backoff.puts_off(peer, self._round):
            return math.inf
        return self._meetings.tier(peer, self._round, len(self.peers))

    def in_turn(self, besides: Set[bytes]) -> Iterator[tuple[float, bytes]]:
        """Yield (tier, peer) of the live peers ``besides`` some, lowest tier first, without peers that are put off."""
        for _, peer in self._meetings.by_turn(self.peers):
            if peer not in besides and (tier := self.tier(peer)) < math.inf:
                yield tier, peer

    def nearest(self, besides: Set[bytes]) -> tuple[float, Iterable[bytes]]:
        """Return the lowest tier of the live peers ``besides`` some, and its peers."""
        for tier, peers in itertools.groupby(self.in_turn(besides), key=lambda each: each[0]):
            return tier, [peer for _, peer in peers]
        return math.inf, self.peers - besides

    def note_meeting(self, peer: bytes) -> None:
        """Use a peer's turn."""
        self._meetings.note_meeting(peer, self._round, len(self.peers))

    def note_failure(self, peer: bytes) -> None:
        """Ask a peer last, for longer after each failure."""
        self._backoff.note_failure(peer, self._round)

    def note_success(self, peer: bytes) -> None:
        """Forgive a peer half of its failures."""
        self._backoff.note_success(peer)
