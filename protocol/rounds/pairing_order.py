"""The order in which a node asks its live peers: by turn, those with failed exchanges last."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Set
from dataclasses import dataclass

from ..wire.bounds import Latest

# A refused contribution, a partner that was not ready in time or proposed again instead, a broken exchange: each costs
# a round, and none proves malice. It puts a peer off for some rounds, twice as many after each failure, more if it
# never exchanged and did not just withdraw late; a committed exchange ends that and forgives half of the failures. Of
# peers that are put off, those with fewer failures come first: else one that never comes is soon as good as any other.
# Strangers came after this node and never exchanged with it: one that fails puts all off, so fresh keys buy nothing.
# Where many founders fail, all that never exchanged are put off, for the same loss would come from each.
#
# A peer that proposes early to all at once would be everyone's partner in each round. So each node counts: a peer may
# have `FAIR_SHARE` of the meetings that chance would give it, at most `FAIR_BURST` at once. No proofs are needed.
#
# - *Turns.* A peer's turn comes once in about as many rounds as there are peers (a leaky bucket). A hash of both keys
#   sets the first: else many greedy members of a large run could take all of a node's first rounds.
# - *Tiers.* Where all peers in turn are taken, the node asks those whose turn comes next, and looks twice as far ahead
#   each time. (If it then met any peer, six greedy members in 66 had 1.9 times their share of the first 28 rounds.)
#
# Peers are put off, not excluded: two nodes alone go on meeting. None of this is sent, so it cannot slander a peer.

# Rounds after the first failure; twice as many after each further one, up to a number of failures.
FIRST_ROUNDS, MAX_FAILURES = 2, 8
# A failure counts for as many if no exchange with the peer was committed yet: 16 rounds, then 256.
FAILURES_OF_UNPROVEN = 4
ROUNDS_OF_STRANGERS = 64  # after a stranger's failure; each stranger that exchanges halves what is left
# The broken agreements that make a node wary, for each peer that kept one. It then meets founders that kept none last,
# once it has so many others, or half of all: with 4, one in ten finds no partner, and all are soon greedy members.
BROKEN_SHARE, ENOUGH_PROVEN = 0.25, 6
# How often a peer may be met, as a share of chance (once in as many rounds as there are peers), and how often at once.
FAIR_SHARE, FAIR_BURST = 1.05, 2
# Rounds of turns before a node's first. With 4, greedy members get less, and twice as many honest ones find no partner.
FIRST_ROUNDS_AHEAD = 7
# Rounds that the first tier reaches ahead; and peers that are remembered: as many as a node meets in days.
TIER_ROUNDS, MAX_PEERS = 4, 4_096
PUT_OFF = 128  # added to the number of failures of peers that are put off: above every other tier


@dataclass(slots=True)
class _Record:
    """A node's memory of one peer."""

    failures: int = 0
    """Failures that are not forgiven."""
    until: int = 0
    """The round from which the peer is as good as any other."""
    is_proven: bool = False
    """Whether an exchange with the peer was ever committed."""
    empty_at: float | None = None
    """The round in which its bucket of meetings is empty; None: there was no meeting."""

    def fail(self, round_: int, count: int) -> None:
        self.failures = min(self.failures + count, MAX_FAILURES)
        self.until = round_ + 1 + (FIRST_ROUNDS << (self.failures - 1))


class PeerOrder:
    """The live peers of a node, in the order in which they are asked in this round."""

    def __init__(self, own: bytes, *, may_doubt: bool = True) -> None:
        """``own``: the node's public key. ``may_doubt``: see `has_doubts`; not where honest peers often come late."""
        self._may_doubt = may_doubt
        self.peers: frozenset[bytes] = frozenset()
        """The live peers, without this node."""
        self._own = own
        self._round = -1
        self._first_round: int | None = None
        self._founders: frozenset[bytes] = frozenset()  # here when this node came; others are strangers until proven
        self._records = Latest[bytes, _Record](MAX_PEERS)
        self._strangers_until = 0  # the round from which strangers are as good as any other
        self._unproven: Set[bytes] = frozenset()  # live founders that never exchanged
        self._has_enough, self._is_shown = True, False  # see `is_wary` and `has_doubts`: they are asked at each message
        self.phase = functools.lru_cache(MAX_PEERS)(self._draw_phase)
        """Share of a peer's period that passes before its first turn: from 0 to 1, the same for both."""
        self._turns: list[tuple[float, bytes]] | None = None
        """When the bucket of each peer is empty, in this order: sorted once a round and not at each proposal."""

    def begin(self, round_: int) -> None:
        """Begin a round; the first one counts."""
        if self._first_round is None:
            self._first_round, self._turns = round_, None
        self._round = round_

    def set_peers(self, peers: frozenset[bytes]) -> None:
        """Replace the live peers."""
        self.peers, self._turns = peers - {self._own}, None
        is_first = self._first_round in (None, self._round)
        self._founders = self._founders | self.peers if is_first else self._founders & self.peers
        self._count()

    def tier(self, peer: bytes) -> int:
        """Return a peer's tier: 0 if it is its turn, each further one reaches twice as far ahead; the lowest is met."""
        if level := self._level(peer):
            return PUT_OFF + level
        ahead = self._emptied_at(peer) - (FAIR_BURST - 1) * self._period - self._round
        return 0 if ahead <= 0 else math.frexp(1 + ahead / TIER_ROUNDS)[1]

    @property
    def put_off(self) -> Set[bytes]:
        """Return the peers before which all others come."""
        found = {peer for peer, record in self._records.items() if self._round < record.until}
        if self._round < self._strangers_until:
            found |= {peer for peer in self.peers if self._is_stranger(peer)}
        if self.is_wary:
            found |= self._unproven
        return found

    def nearest(self, peers: Set[bytes]) -> tuple[float, Iterable[bytes]]:
        """Return the lowest tier of these peers, and those in it; peers that are put off come last."""
        if self._turns is None:
            self._turns = sorted((self._emptied_at(peer), peer) for peer in self.peers)
        in_order = (peer for _, peer in self._turns if peer in peers and not self._level(peer))
        for tier, group in itertools.groupby(in_order, key=self.tier):
            return tier, list(group)
        tiers = {peer: self.tier(peer) for peer in peers}
        lowest = min(tiers.values(), default=math.inf)
        return lowest, [peer for peer, tier in tiers.items() if tier == lowest]

    def is_proven(self, peer: bytes) -> bool:
        """Return whether an exchange with the peer was ever committed."""
        return peer in self._records and self._records[peer].is_proven

    def note_meeting(self, peer: bytes) -> None:
        """Use a peer's turn."""
        self._record(peer).empty_at = max(self._emptied_at(peer), self._round) + self._period
        self._turns = None

    def note_failure(self, peer: bytes) -> None:
        """Put a peer off because it did not keep its word, or the exchange with it failed."""
        self._record(peer).fail(self._round, 1 if self.is_proven(peer) else FAILURES_OF_UNPROVEN)
        if self._is_stranger(peer):
            self._strangers_until = self._round + 1 + ROUNDS_OF_STRANGERS
        self._count()

    def note_withdrawal(self, peer: bytes) -> None:
        """Put a peer off for a round or two because it withdrew late: honest ones do for a better partner."""
        self._record(peer).fail(self._round, 1)

    def note_success(self, peer: bytes) -> None:
        """Forgive a peer half of its failures: an exchange with it was committed."""
        if self._is_stranger(peer):
            self._strangers_until -= max(self._strangers_until - self._round, 0) // 2
        record = self._record(peer)
        record.failures, record.until, record.is_proven = record.failures // 2, 0, True
        self._count()

    def _record(self, peer: bytes) -> _Record:
        self._records[peer] = record = self._records.get(peer) or _Record()
        return record

    def _is_stranger(self, peer: bytes) -> bool:
        return peer not in self._founders and not self.is_proven(peer)

    def _count(self) -> None:
        proven = {peer for peer in self.peers if self.is_proven(peer)}
        broken = {peer for peer, record in self._records.items() if record.failures >= FAILURES_OF_UNPROVEN}
        self._unproven = (self.peers & self._founders) - proven
        self._has_enough = len(proven) >= min(ENOUGH_PROVEN, (len(self.peers) + 1) // 2)
        self._is_shown = len(self._unproven & broken) >= max(BROKEN_SHARE * len(proven), 2 - len(proven), 1)

    @property
    def has_doubts(self) -> bool:
        """Return whether founders break agreements more often than by chance, or a stranger did."""
        return self._may_doubt and (self._is_shown or self._round < self._strangers_until)

    @property
    def is_wary(self) -> bool:
        """Return whether founders that never exchanged are put off."""
        return self._has_enough and self.has_doubts

    def _level(self, peer: bytes) -> int:
        """Return 0, or how many failures of a peer count now; more if strangers or, before them, the unproven count."""
        record = self._records.get(peer)
        is_doubted = self.is_wary and peer in self._unproven
        failures = record.failures if record is not None and (is_doubted or self._round < record.until) else 0
        is_strange = self._round < self._strangers_until and self._is_stranger(peer)
        return failures + (MAX_FAILURES if is_strange else is_doubted)

    @property
    def _period(self) -> float:
        return len(self.peers) / FAIR_SHARE

    def _emptied_at(self, peer: bytes) -> float:
        record = self._records.get(peer)
        if record is not None and record.empty_at is not None:
            return record.empty_at
        return (self._first_round or 0) - FIRST_ROUNDS_AHEAD + (FAIR_BURST - 1 + self.phase(peer)) * self._period

    def _draw_phase(self, peer: bytes) -> float:
        digest = hashlib.sha256(min(self._own, peer) + max(self._own, peer)).digest()
        return int.from_bytes(digest[:4], "big") / 2**32
