"""Which epoch a node is in, by what the others say.

Most of the members whose word counts decide (`farandole.protocol.lease_claims`), and never move a node back: a liar is
outvoted by those with whom there have been exchanges. A newcomer that has met no peer begins where the live say that
the run is, and does not take that for certain: the first majority corrects it, backwards as well. That all epochs are
over, which ends its training, it believes only if all say so.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from .lease_claims import Standing


class EpochVote:
    """One node's view of it."""

    def __init__(self) -> None:
        self.is_new = True
        """Whether the node knows nothing of the epochs by itself."""
        self._is_guess = False  # the epoch is what the live say

    def decide(self, own: int, said: Mapping[bytes, int], standing: Standing, num_epochs: int) -> int:
        """The epoch to be in; ``num_epochs`` when all are over. ``said``: of others, live or not."""
        if standing.has_quorum:
            votes = [said[author] for author in standing.voters if author in said]
            if not votes:
                return own
            epoch = min(int(statistics.median_low(votes)), num_epochs)
            is_guess, self._is_guess = self._is_guess, False
            return epoch if is_guess else max(epoch, own)
        claims = [said[author] for author in standing.live if author in said] if self.is_new else []
        if not claims:
            return own
        most = num_epochs if min(claims) >= num_epochs else num_epochs - 1
        guess = min(int(statistics.median_low(claims)), most)
        self._is_guess = self._is_guess or guess > own
        return max(guess, own)
