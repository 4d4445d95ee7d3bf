"""The links of a node's part in the pipeline: which are opened, what is promised on them, which a microbatch
takes, and which neighbours are avoided.

`farandole.protocol.stages.pipeline` handles the microbatches.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..wire.latest import Latest
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


def grant(
    links: Mapping[int, MicrobatchLink],
    nodes: NodesChanged,
    in_flight: int,
    ahead: int,
    *,
    num_free: int,
    num_waiting: int,
    is_starving: bool,
) -> int:
    """Promise the free slots, each to the link from the stage before with the least; return the next ``ahead``.

    So the microbatches sent to this node are limited to its slots (``in_flight``, of which ``num_free`` are free), and
    to its trainer's speed. A returning microbatch has its slot already. So its link gets twice as many credits as there
    are slots, and new ones when half of them are used: a message for each would cost more than it is worth.
    ``ahead``: microbatches that may wait for their forward pass, at first `MIN_AHEAD`; ``num_waiting``: those that do,
    or are arriving; ``is_starving``: the trainer has nothing to do, although it may begin a microbatch.
    """
    for link in links.values():
        if link.is_return and not link.is_upstream and link.free < in_flight:
            link.credits = link.num_forwarded + min(2 * in_flight, MAX_CREDITS)
    previous = [link for link in links.values() if not link.is_upstream and not link.is_return]
    num_promised = sum(link.free for link in previous)
    # A few microbatches wait for their forward pass, and the trainer never waits. More at a slow node would only be
    # late, and delay the steps of the stages before.
    if num_waiting > MIN_AHEAD:
        ahead = max(MIN_AHEAD, ahead - 1)
    elif not num_waiting and is_starving and num_promised > 0:
        ahead = min(in_flight, ahead + 1)
    # A link's share of the slots. Promises cannot be taken back, so expected links are counted too.
    num_expected = math.ceil(nodes.num_previous * min(1.0, MAX_NEXT_HOPS / max(1, nodes.num_own)))
    share = max(1, in_flight // max(1, len(previous), num_expected))
    may_promise = min(num_free, ahead - num_waiting)
    while previous and num_promised < may_promise:
        least = min(previous, key=lambda link: link.free + len(link.open))
        if least.free + len(least.open) >= share:
            break
        least.credits += 1
        num_promised += 1
    return ahead


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


# A peer's last `NUM_REMEMBERED` microbatches are remembered; `MAX_OUTLIERS` or `MAX_LOST` among them are too many. One
# honest microbatch in a thousand is an outlier: three in 16 occur by chance once in two million microbatches.
NUM_REMEMBERED = 16
MAX_OUTLIERS = 3
MAX_LOST = 12
# Seconds for which a peer is avoided: the first time, and at most. Short at first, because the direction of honest
# gradients turns in the first inner steps of a small model, and two nodes of two stages have no other peers. The
# doubling starts again if `FORGIVEN_AFTER` times the next duration has passed since the last avoidance ended.
FIRST_SECONDS, MAX_SECONDS = 10.0, 86_400.0
FORGIVEN_AFTER = 10
# Peers that are remembered: twice the links of a node (`farandole.protocol.stages.pipeline.MAX_LINKS`).
MAX_PEERS = 2_048

LOSES_ALL = "its microbatches are lost, and those of others are not"


def _newest() -> deque[bool]:
    return deque(maxlen=NUM_REMEMBERED)


@dataclass(slots=True)
class _Record:
    outliers: deque[bool] = field(default_factory=_newest)
    losses: deque[bool] = field(default_factory=_newest)
    seconds: float = FIRST_SECONDS
    """Duration of the next avoidance."""
    until: float = -math.inf


class Avoidance:
    """A node's memory of its neighbours, with some of which it exchanges no microbatches for a while.

    It outlives the trainer. Two things count against a peer. Data that it sends are an outlier, as this node's own
    trainer finds (`farandole.training.engine.link_statistics`). Or microbatches that go over it are lost elsewhere: if
    a node falsifies the data that it forwards, its next neighbour drops them, and the nodes before it see only that
    nothing returns. So a peer is also avoided if most of its microbatches are lost while most of the others' are kept.
    Losses that hit all peers alike count against none.

    A peer is avoided for twice as long each time. Nothing of this is sent to others. A microbatch that others report as
    dropped counts as a loss for the peer that it was sent to. To have an honest peer avoided, liars must make three
    quarters of all its microbatches fail, and less than half of the others', so a minority of liars cannot.
    """

    def __init__(self) -> None:
        self._of = Latest[bytes, _Record](MAX_PEERS)

    def is_avoided(self, peer: bytes, now: float) -> bool:
        """Return whether this peer is avoided at ``now``."""
        record = self._of.get(peer)
        return record is not None and now < record.until

    def until(self, now: float) -> list[float]:
        """Return the times at which the avoided peers are no longer avoided."""
        return [record.until for record in self._of.values() if record.until > now]

    def note_judged(self, peer: bytes, is_outlier: bool, now: float) -> float | None:
        """Note the trainer's verdict on a peer's data; return the seconds for which it is avoided from now, if any."""
        record = self._record(peer)
        record.outliers.append(is_outlier)
        return self._avoid(record, now) if sum(record.outliers) >= MAX_OUTLIERS else None

    def note_end(self, peer: bytes, is_kept: bool, now: float) -> float | None:
        """Note the end of a microbatch that went to a peer, or came from it. Returns the same as `note_judged`."""
        record = self._record(peer)
        record.losses.append(not is_kept)
        if sum(record.losses) < MAX_LOST:
            return None
        others = [is_lost for other in self._of.values() if other is not record for is_lost in other.losses]
        are_kept = len(others) >= NUM_REMEMBERED and 2 * sum(others) < len(others)
        return self._avoid(record, now) if are_kept else None

    def _avoid(self, record: _Record, now: float) -> float | None:
        record.outliers.clear()
        record.losses.clear()
        if now < record.until:
            return None
        if now > record.until + FORGIVEN_AFTER * record.seconds:
            record.seconds = FIRST_SECONDS
        seconds = record.seconds
        record.until = now + seconds
        record.seconds = min(2 * seconds, MAX_SECONDS)
        return seconds

    def _record(self, peer: bytes) -> _Record:
        record = self._of[peer] = self._of.get(peer) or _Record()
        return record
