"""Which peers are asked last: those with whom exchanges failed, and those that are met more often than by chance.

A contribution that was refused, a partner that was not ready in time, an exchange that broke: none of it proves ill
will, and all of it costs a round. A peer is put off for some rounds, twice as many after each failure in a row.

A peer that proposes to all others at once, and early, would be the partner of them all in each round. So each node
counts for itself: a peer may have `FAIR_SHARE` of the meetings that chance would give it, and no more than
`FAIR_BURST` at once. If every node counts, nobody has to prove or to announce whom it has met.

Peers are put off, not shut out: where no other peer is free they are met all the same, so two nodes alone go on
meeting. Nothing here is said to others, so it cannot be used to slander anyone.
"""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

# Rounds after the first failure; twice as many after each further one in a row, up to a limit.
FIRST_ROUNDS, MAX_ROUNDS = 2, 256
# A peer may be met this many times as often as by chance, which is once in as many rounds as there are peers; honest
# ones differ by chance, so a second meeting soon after the first is nothing unusual.
FAIR_SHARE, FAIR_BURST = 1.15, 2
# Peers that may be met in a node's first round: enough that all but 0.6 % of 60 nodes find a free one (4: 1.2 %).
FIRST_PEERS = 8
# Peers that are remembered, those that failed last: as many as a node meets in days.
MAX_PEERS = 4_096


@dataclass(slots=True)
class _FailedExchanges:
    in_a_row: int
    until: int
    """The round from which the peer is as good as any other."""


class PartnerBackoff:
    """The failures of one node's peers, in rounds of its own."""

    def __init__(self) -> None:
        self._of: OrderedDict[bytes, _FailedExchanges] = OrderedDict()

    def note_failure(self, peer: bytes, round_: int) -> None:
        """Nothing came of the exchange with a peer."""
        failures = self._of.setdefault(peer, _FailedExchanges(0, 0))
        self._of.move_to_end(peer)
        failures.in_a_row += 1
        failures.until = round_ + 1 + min(FIRST_ROUNDS << min(failures.in_a_row - 1, 30), MAX_ROUNDS)
        while len(self._of) > MAX_PEERS:
            self._of.popitem(last=False)

    def note_success(self, peer: bytes) -> None:
        """The exchange with a peer was committed."""
        self._of.pop(peer, None)

    def puts_off(self, peer: bytes, round_: int) -> bool:
        """Whether others come before this peer."""
        failures = self._of.get(peer)
        return failures is not None and round_ < failures.until


class MeetingLimit:
    """How often each peer was met: a leaky bucket for each, kept as the round in which it will be empty.

    Were all buckets empty at the start, many greedy members of a large run could have all of a node's first rounds
    between them. So buckets start as full as a hash of both keys says: the two agree on when they may first meet.
    """

    def __init__(self, own: bytes) -> None:
        """``own``: the node's public key."""
        self._own = own
        self._first_round: int | None = None
        self._empty_at: OrderedDict[bytes, float] = OrderedDict()
        self._phase = functools.lru_cache(MAX_PEERS)(self._draw_phase)

    def begin(self, round_: int) -> None:
        """A round begins; the first one counts."""
        if self._first_round is None:
            self._first_round = round_

    def note_meeting(self, peer: bytes, round_: int, num_peers: int) -> None:
        """An exchange with a peer has begun, where ``num_peers`` could have been met."""
        self._empty_at[peer] = max(self._emptied_at(peer, num_peers), round_) + num_peers / FAIR_SHARE
        self._empty_at.move_to_end(peer)
        while len(self._empty_at) > MAX_PEERS:
            self._empty_at.popitem(last=False)

    def may_be_met(self, peers: Iterable[bytes], round_: int, num_peers: int) -> list[bytes]:
        """Those of the peers that are not put off, in their order."""
        full = round_ + (FAIR_BURST - 1) * num_peers / FAIR_SHARE
        first, period = self._emptied_at_first(0.0, num_peers), num_peers / FAIR_SHARE
        known, phase = self._empty_at, self._phase
        return [peer for peer in peers if (known[peer] if peer in known else first + phase(peer) * period) <= full]

    def _emptied_at(self, peer: bytes, num_peers: int) -> float:
        if (empty_at := self._empty_at.get(peer)) is not None:
            return empty_at
        return self._emptied_at_first(self._phase(peer), num_peers)

    def _emptied_at_first(self, phase: float, num_peers: int) -> float:
        """Of one that was never met."""
        return (self._first_round or 0) - FIRST_PEERS + (FAIR_BURST - 1 + phase) * num_peers / FAIR_SHARE

    def _draw_phase(self, peer: bytes) -> float:
        """From 0 to 1; the same for both."""
        digest = hashlib.sha256(min(self._own, peer) + max(self._own, peer)).digest()
        return int.from_bytes(digest[:4], "big") / 2**32
