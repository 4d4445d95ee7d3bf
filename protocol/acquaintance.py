"""Whose word counts for more than a key's: members that have been met in exchanges.

Keys are free, and so are heartbeats. An exchange that both sides commit takes a round of an honest node, which meets
one peer a round, and each of them about equally often. So a member is *proven* to a node that has committed an exchange
with it, or to which `NUM_VOUCHERS` members of that kind have said in their heartbeats that they have: in a run of a
thousand a node knows most after some 75 rounds, and not after a thousand.

Who gains by lying: as many met members as there are vouchers can make any key proven. Each of them has been met by each
node that believes them. Sans-IO.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from .entries import PARTNER_BYTES

# One liar, and two, make nobody proven.
NUM_VOUCHERS = 3


class Acquaintance:
    """Whom one node knows to have exchanged with it, or with those that have."""

    def __init__(self) -> None:
        self._vouchers: dict[bytes, set[bytes]] = {}  # of live members that are not met

    def proven(self, met: Set[bytes], partners: Mapping[bytes, bytes]) -> frozenset[bytes]:
        """Authors whose word counts.

        ``met``: those with whom this node has committed exchanges. ``partners``: of each live member, the beginning of
        the key of the peer that it has averaged with in its last round; empty: none, or it does not say.
        """
        unmet = {author[:PARTNER_BYTES]: author for author in partners.keys() - met}
        self._vouchers = {author: self._vouchers.get(author, set()) for author in unmet.values()}
        for author in partners.keys() & met:
            if (partner := unmet.get(partners[author])) is not None:
                self._vouchers[partner].add(author)
        vouched = (author for author, vouchers in self._vouchers.items() if len(vouchers) >= NUM_VOUCHERS)
        return frozenset((*met, *vouched))
