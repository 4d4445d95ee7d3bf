"""The links of a node's part in the pipeline: which are opened, what is promised on them, which a microbatch takes.

`farandole.protocol.stages.pipeline` handles the microbatches.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping

from .activations import MAX_CREDITS
from .microbatches import Microbatch, MicrobatchLink
from .pipeline_events import NodesChanged

# Links to nodes of the next stage that are kept open: enough choice to be random, few enough that each has credits.
MAX_NEXT_HOPS = 8
# A node waits for this time before it tries a lost link again, or one over which a microbatch was refused.
RETRY_INTERVAL = 2.0
# Microbatches that wait for their forward pass: one that arrives while the one before is computed, and one to spare.
MIN_AHEAD = 2


class Dialling:
    """Decides which links this node opens."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._under_way: set[tuple[bytes, bool]] = set()
        self._not_before: dict[bytes, float] = {}

    @property
    def retries_at(self) -> Iterable[float]:
        """Return the times of the next retries."""
        return self._not_before.values()

    def note_open(self, peer: bytes, is_return: bool) -> None:
        """Note that a link was opened."""
        self._under_way.discard((peer, is_return))

    def note_failed(self, peer: bytes, is_return: bool, now: float) -> None:
        """Note that a link could not be opened."""
        self._under_way.discard((peer, is_return))
        if not is_return:
            self.note_lost(peer, now)

    def note_lost(self, peer: bytes, now: float) -> None:
        """Note that a link to the next stage was lost."""
        self._not_before[peer] = now + RETRY_INTERVAL

    def next_hops(self, links: Iterable[MicrobatchLink], nodes: frozenset[bytes], now: float) -> list[bytes]:
        """Choose nodes of the next stage to open links to now: drawn at random, up to `MAX_NEXT_HOPS` in all."""
        known = self._known(links)
        candidates = sorted(
            peer for peer in nodes if (peer, False) not in known and self._not_before.get(peer, -math.inf) <= now
        )
        num_wanted = max(0, min(MAX_NEXT_HOPS - len(known), len(candidates)))
        return self._begin(self._rng.sample(candidates, num_wanted), is_return=False)

    def origins(self, links: Iterable[MicrobatchLink], wanted: set[bytes]) -> list[bytes]:
        """Return the origins among ``wanted`` to which links are opened now."""
        known = self._known(links)
        return self._begin([peer for peer in wanted if (peer, True) not in known], is_return=True)

    def _known(self, links: Iterable[MicrobatchLink]) -> set[tuple[bytes, bool]]:
        return {(link.peer, link.is_return) for link in links if link.is_upstream} | self._under_way

    def _begin(self, peers: list[bytes], *, is_return: bool) -> list[bytes]:
        self._under_way.update((peer, is_return) for peer in peers)
        return sorted(peers)


class Promises:
    """Limits the microbatches sent to this node to its free slots, and to its trainer's speed."""

    def __init__(self, in_flight: int) -> None:
        """``in_flight``: this node's slots."""
        self._in_flight = in_flight
        self._ahead = MIN_AHEAD

    def grant(
        self,
        links: Mapping[int, MicrobatchLink],
        nodes: NodesChanged,
        *,
        num_free: int,
        num_waiting: int,
        is_starving: bool,
    ) -> None:
        """Promise the free slots, each to the link from the stage before with the least.

        A returning microbatch has its slot already. So its link gets twice as many credits as there are slots, and new
        ones when half of them are used: a message for each would cost more than it is worth. ``num_waiting``:
        microbatches that wait for their forward pass, or are arriving; ``is_starving``: the trainer has nothing to do,
        although it may begin a microbatch.
        """
        for link in links.values():
            if link.is_return and not link.is_upstream and link.free < self._in_flight:
                link.credits = link.num_forwarded + min(2 * self._in_flight, MAX_CREDITS)
        previous = {number: link for number, link in links.items() if not link.is_upstream and not link.is_return}
        num_promised = sum(link.free for link in previous.values())
        # A few microbatches wait for their forward pass, and the trainer never waits. More at a slow node would only be
        # late, and delay the steps of the stages before.
        if num_waiting > MIN_AHEAD:
            self._ahead = max(MIN_AHEAD, self._ahead - 1)
        elif not num_waiting and is_starving and num_promised > 0:
            self._ahead = min(self._in_flight, self._ahead + 1)
        # A link's share of the slots. Promises cannot be taken back, so expected links are counted too.
        num_expected = math.ceil(nodes.num_previous * min(1.0, MAX_NEXT_HOPS / max(1, nodes.num_own)))
        share = max(1, self._in_flight // max(1, len(previous), num_expected))
        may_promise = min(num_free, self._ahead - num_waiting)
        while previous and num_promised < may_promise:
            number = min(previous, key=lambda number: previous[number].free + len(previous[number].open))
            if previous[number].free + len(previous[number].open) >= share:
                break
            previous[number].credits += 1
            num_promised += 1


def choose_hop(
    links: Mapping[int, MicrobatchLink], microbatch: Microbatch, now: float, rng: random.Random
) -> int | None:
    """Draw the link over which a microbatch goes on, in proportion to the credits left; None: it waits.

    ``links``: the links towards its destination. A peer that has refused or lost it is the last resort.
    """
    hops = {
        number: link.free
        for number, link in links.items()
        if link.is_upstream and link.free > 0 and link.wait_until <= now
    }
    untried = {number: free for number, free in hops.items() if links[number].peer not in microbatch.tried}
    hops = untried or hops
    return rng.choices(list(hops), list(hops.values()))[0] if hops else None
