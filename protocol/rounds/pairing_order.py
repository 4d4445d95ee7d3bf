"""The order in which a node asks its live peers: by turn (`MeetingLimit`), those with failed exchanges last.

*Near and far.* With `RoundConfig.far_every` a node asks only near peers in most rounds. In the others it asks far ones,
and near ones if no far one is free. These are the rounds whose number is a multiple of ``far_every``, so that near
nodes look for far partners at the same time and leave none of them without a near one. The numbers of far nodes' rounds
may differ by some rounds, so a node also accepts the proposal of a far peer in any round, if its last far meeting was
at least half of ``far_every`` ago, and looks for one itself if it was twice as long ago. Near and far peers have turns
of their own.

A peer that is near is met often. It cannot claim to be: this node measures the round trip, and a peer can only lengthen
it. But whoever rents a machine near a node can be its most frequent partner, so the setting suits runs whose members
are invited.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Set
from typing import Final

from .pairing_backoff import MeetingLimit, PartnerBackoff

# Added to the tiers of near peers in rounds for far ones: above every tier of a far peer.
BEHIND_FAR: Final = 64


class PeerOrder:
    """The live peers of a node, in the order in which they are asked in this round."""

    def __init__(self, own: bytes, far_every: int = 1) -> None:
        """``own``: the node's public key. ``far_every``: see `RoundConfig.far_every`."""
        self.peers: frozenset[bytes] = frozenset()
        """The live peers, without this node."""
        self.seeks_far = True
        """Whether this round is for far peers; always so if distance is ignored, as all peers count as far then."""
        self._own = own
        self._far_every = far_every
        self._near = self._far = frozenset[bytes]()
        self._round = -1
        self._last_far_round: int | None = None
        self._backoff = PartnerBackoff()
        self._near_meetings, self._far_meetings = MeetingLimit(own), MeetingLimit(own)

    @property
    def to_ask(self) -> frozenset[bytes]:
        """The live peers that this node may ask in this round."""
        return self.peers if self.seeks_far else self._near

    def begin(self, round_: int) -> None:
        """Begin a round; the first one counts."""
        self._round = round_
        self._near_meetings.begin(self._turns(is_near=True))
        self._far_meetings.begin(self._turns(is_near=False))
        is_planned = round_ % self._far_every == 0
        self.seeks_far = (is_planned and self._may_meet_far()) or self._rounds_since_far >= 2 * self._far_every

    def set_peers(self, peers: frozenset[bytes], near: frozenset[bytes] = frozenset()) -> None:
        """Replace the live peers; ``near``: the near ones among them."""
        self.peers = peers - {self._own}
        self._near = near & self.peers if self._far_every > 1 else frozenset()
        self._far = self.peers - self._near

    def is_near(self, peer: bytes) -> bool:
        """Return whether a peer has the turns of near ones."""
        return peer in self._near

    def may_meet(self, peer: bytes) -> bool:
        """Return whether a peer's proposal may be accepted in this round: a far one's only now and then."""
        return self.is_near(peer) or self._may_meet_far()

    def tier(self, peer: bytes) -> float:
        """Return a peer's tier: lower tiers are met first, and peers with failed exchanges last."""
        if self._backoff.puts_off(peer, self._round):
            return math.inf
        if self.is_near(peer):
            return self._tier(peer, is_near=True) + (BEHIND_FAR if self.seeks_far else 0)
        return self._tier(peer, is_near=False) if self._may_meet_far() else math.inf

    def in_turn(self, besides: Set[bytes]) -> Iterator[tuple[float, bytes]]:
        """Yield (tier, peer) of peers to ask ``besides`` some, lowest tier first, without peers that are put off."""
        far = self._far_meetings.by_turn(self._far) if self.seeks_far else ()
        for _, peer in itertools.chain(far, self._near_meetings.by_turn(self._near)):
            if peer not in besides and (tier := self.tier(peer)) < math.inf:
                yield tier, peer

    def nearest(self, besides: Set[bytes]) -> tuple[float, Iterable[bytes]]:
        """Return the lowest tier of the peers to ask ``besides`` some, and its peers."""
        for tier, peers in itertools.groupby(self.in_turn(besides), key=lambda each: each[0]):
            return tier, [peer for _, peer in peers]
        return math.inf, self.to_ask - besides

    def note_meeting(self, peer: bytes) -> None:
        """Use a peer's turn."""
        if self.is_near(peer):
            self._near_meetings.note_meeting(peer, self._turns(is_near=True), len(self._near))
        else:
            self._far_meetings.note_meeting(peer, self._turns(is_near=False), len(self._far))

    def note_failure(self, peer: bytes) -> None:
        """Ask a peer last, for longer after each failure."""
        self._backoff.note_failure(peer, self._round)

    def note_success(self, peer: bytes) -> None:
        """Forgive a peer half of its failures; if it is far, none is due for some rounds."""
        self._backoff.note_success(peer)
        if not self.is_near(peer):
            self._last_far_round = self._round

    @property
    def _rounds_since_far(self) -> int:
        """Rounds since the last far meeting; before the first one as many as make it due."""
        return self._far_every if self._last_far_round is None else self._round - self._last_far_round

    def _may_meet_far(self) -> bool:
        return 2 * self._rounds_since_far >= self._far_every - 1

    def _turns(self, *, is_near: bool) -> int:
        """Return the number of earlier rounds that were for near, or for far peers."""
        num_far = self._round // self._far_every
        return self._round - num_far if is_near else num_far

    def _tier(self, peer: bytes, *, is_near: bool) -> float:
        meetings, peers = (self._near_meetings, self._near) if is_near else (self._far_meetings, self._far)
        return meetings.tier(peer, self._turns(is_near=is_near), len(peers))
