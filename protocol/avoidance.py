"""Which neighbours a node sends no microbatches to and takes none from, for a while.

Two things count against a peer. What it sends is an outlier, as this node's own trainer finds
(`farandole.training.link_statistics`). Or what goes over it is lost elsewhere: where a node falsifies what it sends on,
its next neighbour drops that, and the nodes before it see only that nothing comes back. So a peer is also avoided if
most of its microbatches are lost while most of the others' are kept. Losses that hit all peers alike count against
none.

A peer is avoided for twice as long each time. Nothing here is said to others. What others say, that a microbatch was
dropped, counts as a loss at whoever it went to: to have an honest peer avoided, liars must make three quarters of all
its microbatches fail, and less than half of the others', so a minority of them cannot.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field

# Microbatches of a peer that are remembered; so many outliers, or losses, among them are too many. Of honest ones, one
# in a thousand is an outlier: three in 16 come by chance once in two million microbatches.
NUM_REMEMBERED = 16
MAX_OUTLIERS = 3
MAX_LOST = 12
# The first time, and the most. Short at first, because the direction of honest gradients turns in the first inner steps
# of a small model, and two nodes of two stages have nobody else. What was long ago is forgiven: after so many times as
# long.
FIRST_SECONDS, MAX_SECONDS = 10.0, 86_400.0
FORGIVEN_AFTER = 10
# Peers that are remembered: twice as many as a node has links (`pipeline.MAX_LINKS`).
MAX_PEERS = 2_048

LOSES_ALL = "its microbatches are lost, and those of others are not"


def _newest() -> deque[bool]:
    return deque(maxlen=NUM_REMEMBERED)


@dataclass(slots=True)
class _Record:
    outliers: deque[bool] = field(default_factory=_newest)
    losses: deque[bool] = field(default_factory=_newest)
    seconds: float = FIRST_SECONDS
    """For how long, the next time."""
    until: float = -math.inf


class Avoidance:
    """What a node remembers of its neighbours in the pipeline. Outlives the trainer."""

    def __init__(self) -> None:
        self._of = OrderedDict[bytes, _Record]()

    def is_avoided(self, peer: bytes, now: float) -> bool:
        """Whether nothing goes to this peer, or comes from it."""
        record = self._of.get(peer)
        return record is not None and now < record.until

    def until(self, now: float) -> list[float]:
        """When peers that are avoided are as good as others again."""
        return [record.until for record in self._of.values() if record.until > now]

    def note_judged(self, peer: bytes, is_outlier: bool, now: float) -> float | None:
        """The trainer has looked at what a peer sent. For how many seconds it is avoided from now on, if it is."""
        record = self._record(peer)
        record.outliers.append(is_outlier)
        return self._avoid(record, now) if sum(record.outliers) >= MAX_OUTLIERS else None

    def note_end(self, peer: bytes, is_kept: bool, now: float) -> float | None:
        """A microbatch that went to a peer, or came from it, is at its end. As `note_judged`."""
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
        record = self._of.setdefault(peer, _Record())
        self._of.move_to_end(peer)
        while len(self._of) > MAX_PEERS:
            self._of.popitem(last=False)
        return record
