"""Proven members: the ones whose claims count, because exchanges with them were committed.

Keys are free, and so are heartbeats. An exchange that both sides commit takes a round of an honest node, which meets
one peer a round, and each peer about equally often. So a node takes a member as *proven* if it has committed an
exchange with it, or if `NUM_VOUCHERS` members with which it has done so report in their heartbeats an exchange with
that member. In a run of a thousand members a node then knows most of them after about 75 rounds instead of a thousand.

The gain from lying is bounded: `NUM_VOUCHERS` met members can make any key proven, but each of them must have been met
by each node that believes them. Sans-IO.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from .entries import PARTNER_BYTES

# With three, neither one liar nor two can make a key proven.
NUM_VOUCHERS = 3


class Acquaintance:
    """The members that one node knows to be proven, and which members vouch for the others."""

    def __init__(self) -> None:
        self._vouchers: dict[bytes, set[bytes]] = {}  # of live members that are not met

    def proven(self, met: Set[bytes], partners: Mapping[bytes, bytes]) -> frozenset[bytes]:
        """Return the authors that are proven.

        ``met``: the members with which this node has committed exchanges. ``partners``: for each live member, the first
        bytes of the key of the peer that it averaged with in its last round; empty: none, or not reported.
        """
        unmet = {author[:PARTNER_BYTES]: author for author in partners.keys() - met}
        self._vouchers = {author: self._vouchers.get(author, set()) for author in unmet.values()}
        for author in partners.keys() & met:
            if (partner := unmet.get(partners[author])) is not None:
                self._vouchers[partner].add(author)
        vouched = (author for author, vouchers in self._vouchers.items() if len(vouchers) >= NUM_VOUCHERS)
        return frozenset((*met, *vouched))
