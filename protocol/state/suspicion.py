"""Members' suspicions of each other: which peers a node's screening suspects, and when other members' lists count.

Two members of a run of hundreds meet rarely, so a peer that does a little harm each time is found late by any one of
them. Each member publishes the peers that it suspects at present, and takes a peer off the list when later exchanges
with it are good.

Keys cost nothing, so a list counts only if this node has committed exchanges with its author, and enough such lists
must name a peer. Even then the lists do not decide: they lower the amount of evidence of its own that a node needs
(`farandole.training.screening.guard`). With false suspicions, liars can only make a node ignore an honest member while
that node itself finds the member's weights worse than its own, for example after a long absence.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from .entries import MAX_SUSPECTS, PARTNER_BYTES, Suspects

# Enough accusers: a third of the members whose lists count, which a quarter of liars cannot reach, within these bounds.
# The upper one is for large runs, in which few members have met the peer at all.
MIN_ACCUSERS: Final = 3
MAX_ACCUSERS: Final = 6


class OwnSuspects:
    """The peers that this node suspects, the latest last, and at most `MAX_SUSPECTS`."""

    def __init__(self) -> None:
        self._suspected: OrderedDict[bytes, None] = OrderedDict()

    def note(self, peer: bytes, *, is_suspect: bool) -> bool:
        """Note the screening's latest result for a peer; return whether the list has changed."""
        has_changed = is_suspect != (peer in self._suspected)
        if is_suspect:
            self._suspected[peer] = None
            self._suspected.move_to_end(peer)
        else:
            self._suspected.pop(peer, None)
        while len(self._suspected) > MAX_SUSPECTS:
            self._suspected.popitem(last=False)
        return has_changed

    def __bool__(self) -> bool:
        return bool(self._suspected)

    @property
    def entry(self) -> Suspects:
        """Return the list as it is published."""
        return Suspects(tuple(sorted(peer[:PARTNER_BYTES] for peer in self._suspected)))


def is_suspected(peer: bytes, lists: Iterable[Suspects], num_believed: int) -> bool:
    """Return whether enough lists name a peer. ``lists`` are from ``num_believed`` members, without the peer's own."""
    enough = min(max(-(-num_believed // 3), MIN_ACCUSERS), MAX_ACCUSERS)
    return sum(peer[:PARTNER_BYTES] in told.peers for told in lists) >= enough
