"""Vote on the epoch that a node is in.

The majority of the members whose claims count decides (`farandole.protocol.epochs.lease_claims`), and never moves a
node back: a liar is outvoted by the members with which there have been exchanges. A newcomer that has met no peer
starts at the epoch that the live members report, as a guess: the first majority corrects it, backwards as well. It
believes that all epochs are over, which ends its training, only if all members say so.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from .lease_claims import Standing


class EpochVote:
    """One node's view of the current epoch."""

    def __init__(self) -> None:
        self.is_new = True
        """Whether the node has no knowledge of its own about the epochs."""
        self._is_guess = False  # the epoch comes from the live members' claims

    def decide(self, own: int, said: Mapping[bytes, int], standing: Standing, num_epochs: int) -> int:
        """Return the epoch to be in; ``num_epochs`` if all are over. ``said``: epochs of others, live or not."""
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
