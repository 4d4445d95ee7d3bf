"""The order in which a node asks its live peers: by turn (`MeetingLimit`), those with failed exchanges last."""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

# Decide which peers are asked last: peers with failed exchanges, and peers met more often than by chance.
#
# A refused contribution, a partner that was not ready in time, withdrew late or proposed again instead, a broken
# exchange: each costs a round, and none proves malice. A peer is put off for some rounds, twice as many after each
# failure. A committed exchange ends that and forgives half of the failures: so a peer that is good for one round in
# four is soon met last most of the time. Among peers that are put off, those with fewer failures come first: otherwise
# a peer that never comes is soon as good as honest ones whose exchanges it has upset. For the same reason a peer that
# never exchanged is put off for longer. Strangers, which came after this node and never exchanged with it, are put off
# together, so fresh keys buy nothing.
#
# A peer that proposes early to all others at once would be the partner of all of them in each round. So each node keeps
# its own counts: a peer may have `FAIR_SHARE` of the meetings that chance would give it, and no more than `FAIR_BURST`
# at once. Because every node counts, no node has to prove or announce its meetings.
#
# - *Turns.* A peer's turn comes once in about as many rounds as there are peers. A hash of both keys decides the round
# of the first turn: otherwise many greedy members of a large run could take all of a node's first rounds. - *Tiers.*
# Where all peers in turn are taken, the node asks the peers whose turn comes next, and looks twice as far ahead each
# time. A peer that is met early has used its turn, so greedy members gain no further meetings from the nodes that are
# left over late in a round. (Where these met any peer, six greedy members in 66 had 1.9 times their share of the first
# 28 rounds.)
#
# Peers are put off, not excluded: where no other peer is free they are met all the same, so two nodes alone go on
# meeting. None of this is sent to others, so it cannot be used to slander a peer.

# Rounds after the first failure; twice as many after each further one, up to a number of failures.
FIRST_ROUNDS, MAX_FAILURES = 2, 8
# A failure counts for as many if no exchange with the peer was committed yet: 32 rounds, then 256.
FAILURES_OF_UNPROVEN = 5
# Failures of all strangers together: who changes its key after each failure is met in one round of 65.
MAX_FAILURES_OF_STRANGERS = 6
MAX_ROUNDS = FIRST_ROUNDS << (MAX_FAILURES - 1)
# A peer may be met this many times as often as by chance, which is once in as many rounds as there are peers; honest
# ones differ by chance, so a second meeting soon after the first is nothing unusual.
FAIR_SHARE, FAIR_BURST = 1.05, 2
# Rounds whose turns have come before a node's first round. With fewer, greedy members get less of the first rounds, and
# more honest nodes find no partner: with 4, twice as many.
FIRST_ROUNDS_AHEAD = 7
# The first tier behind the peers in turn reaches this many rounds ahead.
TIER_ROUNDS = 4
# Number of peers that are remembered, the latest to fail: as many as a node meets in days.
MAX_PEERS = 4_096


@dataclass(slots=True)
class _Failures:
    number: int = 0
    """Failures that are not forgiven."""
    until: int = 0
    """The round from which the peer is as good as any other."""

    is_proven: bool = False
    """Whether an exchange with the peer was ever committed."""

    def add(self, round_: int, number: int, most: int) -> None:
        self.number = min(self.number + number, most)
        self.until = round_ + 1 + (FIRST_ROUNDS << (self.number - 1))


class PartnerBackoff:
    """Failures of one node's peers, in this node's rounds."""

    def __init__(self) -> None:
        self._of: OrderedDict[bytes, _Failures] = OrderedDict()
        self._of_strangers = _Failures()
        self.founders: frozenset[bytes] = frozenset()
        """Peers that were there when this node came; all others are strangers until an exchange is committed."""

    def note_failure(self, peer: bytes, round_: int) -> None:
        """Put a peer off because it did not keep its word, or the exchange with it failed."""
        own = self._record(peer)
        own.add(round_, 1 if own.is_proven else FAILURES_OF_UNPROVEN, MAX_FAILURES)
        if self._is_stranger(peer):
            self._of_strangers.add(round_, FAILURES_OF_UNPROVEN, MAX_FAILURES_OF_STRANGERS)

    def note_success(self, peer: bytes) -> None:
        """Forgive a peer half of its failures: an exchange with it was committed."""
        if self._is_stranger(peer):
            self._of_strangers.number //= 2
        own = self._record(peer)
        own.number, own.until, own.is_proven = own.number // 2, 0, True

    def level(self, peer: bytes, round_: int) -> int:
        """Return 0, or if others come before this peer how many failures speak against it."""
        return sum(each.number for each in self._counted(peer) if round_ < each.until)

    def put_off(self, peers: frozenset[bytes], round_: int) -> Set[bytes]:
        """Return those of these peers whose level is not 0; others may be among them."""
        found = {peer for peer, each in self._of.items() if round_ < each.until}
        if self._of_strangers.number and round_ < self._of_strangers.until:
            found |= peers - self.founders - {peer for peer, each in self._of.items() if each.is_proven}
        return found

    def is_proven(self, peer: bytes) -> bool:
        """Return whether an exchange with the peer was ever committed."""
        return peer in self._of and self._of[peer].is_proven

    def _is_stranger(self, peer: bytes) -> bool:
        return peer not in self.founders and not self.is_proven(peer)

    def _counted(self, peer: bytes) -> Iterator[_Failures]:
        """Yield what counts against a peer: its own failures, and of a stranger those of all strangers."""
        if peer in self._of:
            yield self._of[peer]
        if self._is_stranger(peer):
            yield self._of_strangers

    def _record(self, peer: bytes) -> _Failures:
        record = self._of.setdefault(peer, _Failures())
        self._of.move_to_end(peer)
        while len(self._of) > MAX_PEERS:
            self._of.popitem(last=False)
        return record


class MeetingLimit:
    """Counts meetings with each peer in a leaky bucket, kept as the round in which it is empty.

    A hash of both keys sets a bucket's initial level, so two nodes agree on when they may first meet.
    """

    def __init__(self, own: bytes) -> None:
        """``own``: the node's public key."""
        self._own = own
        self._first_round: int | None = None
        self._empty_at: OrderedDict[bytes, float] = OrderedDict()
        self.phase = functools.lru_cache(MAX_PEERS)(self._draw_phase)
        """Share of a peer's period that passes before its first turn: from 0 to 1, the same for both."""
        self._ordered: frozenset[bytes] | None = None
        self._order: list[tuple[float, bytes]] = []
        """When the bucket of each ordered peer is empty, in this order: sorted once and not at each proposal."""

    def begin(self, round_: int) -> None:
        """Note that a round begins; the first one counts."""
        if self._first_round is None:
            self._first_round = round_
            self._ordered = None

    def by_turn(self, peers: frozenset[bytes]) -> Sequence[tuple[float, bytes]]:
        """Return peers in the order of their turns, after a number by which they are ordered.

        Sorts only for another set of peers than before. The order is valid until the next call of a method.
        """
        if self._ordered is not peers:
            self._ordered = peers
            self._order = sorted((self._emptied_at(peer, len(peers)), peer) for peer in peers)
        return self._order

    def note_meeting(self, peer: bytes, round_: int, num_peers: int) -> None:
        """Use a peer's turn, where ``num_peers`` could have been met."""
        emptied_at = self._emptied_at(peer, num_peers)
        self._empty_at[peer] = max(emptied_at, round_) + num_peers / FAIR_SHARE
        self._empty_at.move_to_end(peer)
        place = bisect.bisect_left(self._order, (emptied_at, peer))
        if self._order[place : place + 1] == [(emptied_at, peer)]:
            del self._order[place]
            bisect.insort(self._order, (self._empty_at[peer], peer))
        else:  # the order was of other peers
            self._ordered = None
        while len(self._empty_at) > MAX_PEERS:
            self._empty_at.popitem(last=False)
            self._ordered = None

    def tier(self, peer: bytes, round_: int, num_peers: int) -> int:
        """Return 0 if it is the peer's turn; each further tier reaches twice as far ahead."""
        ahead = self._emptied_at(peer, num_peers) - (FAIR_BURST - 1) * num_peers / FAIR_SHARE - round_
        return 0 if ahead <= 0 else math.frexp(1 + ahead / TIER_ROUNDS)[1]

    def _emptied_at(self, peer: bytes, num_peers: int) -> float:
        if peer in self._empty_at:
            return self._empty_at[peer]
        period = num_peers / FAIR_SHARE
        return (self._first_round or 0) - FIRST_ROUNDS_AHEAD + (FAIR_BURST - 1 + self.phase(peer)) * period

    def _draw_phase(self, peer: bytes) -> float:
        digest = hashlib.sha256(min(self._own, peer) + max(self._own, peer)).digest()
        return int.from_bytes(digest[:4], "big") / 2**32


# Added to the number of failures of peers that are put off: above every other tier.
PUT_OFF = 128


class PeerOrder:
    """The live peers of a node, in the order in which they are asked in this round."""

    def __init__(self, own: bytes) -> None:
        """``own``: the node's public key."""
        self.peers: frozenset[bytes] = frozenset()
        """The live peers, without this node."""
        self._own = own
        self._round = -1
        self._is_settled = False
        """Whether the first round is over."""
        self._backoff = PartnerBackoff()
        self._meetings = MeetingLimit(own)

    def begin(self, round_: int) -> None:
        """Begin a round; the first one counts."""
        self._is_settled = self._round >= 0
        self._round = round_
        self._meetings.begin(round_)

    def set_peers(self, peers: frozenset[bytes]) -> None:
        """Replace the live peers."""
        self.peers = peers - {self._own}
        if not self._is_settled:
            self._backoff.founders |= self.peers

    def tier(self, peer: bytes) -> int:
        """Return a peer's tier: lower tiers are met first, and peers with failed exchanges last."""
        if level := self._backoff.level(peer, self._round):
            return PUT_OFF + level
        return self._meetings.tier(peer, self._round, len(self.peers))

    @property
    def put_off(self) -> Set[bytes]:
        """Return the peers before which all others come."""
        return self._backoff.put_off(self.peers, self._round)

    def nearest(self, peers: Set[bytes]) -> tuple[float, Iterable[bytes]]:
        """Return the lowest tier of these peers, and those in it; peers that are put off come last."""
        in_order = (peer for _, peer in self._meetings.by_turn(self.peers) if peer in peers)
        for tier, group in itertools.groupby(((self.tier(peer), peer) for peer in in_order), key=lambda each: each[0]):
            if tier < PUT_OFF:
                return tier, [peer for _, peer in group]
        tiers = {peer: self.tier(peer) for peer in peers}
        lowest = min(tiers.values(), default=math.inf)
        return lowest, [peer for peer, tier in tiers.items() if tier == lowest]

    def note_meeting(self, peer: bytes) -> None:
        """Use a peer's turn."""
        self._meetings.note_meeting(peer, self._round, len(self.peers))

    def note_failure(self, peer: bytes) -> None:
        """Ask a peer last, for longer after each failure."""
        self._backoff.note_failure(peer, self._round)

    def is_proven(self, peer: bytes) -> bool:
        """Return whether an exchange with the peer was ever committed."""
        return self._backoff.is_proven(peer)

    def note_success(self, peer: bytes) -> None:
        """Forgive a peer half of its failures."""
        self._backoff.note_success(peer)
