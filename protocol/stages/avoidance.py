"""Avoidance: neighbours in the pipeline that a node exchanges no microbatches with for a while.

Two things count against a peer. Data that it sends are an outlier, as this node's own trainer finds
(`farandole.training.engine.link_statistics`). Or microbatches that go over it are lost elsewhere: if a node falsifies
the data that it forwards, its next neighbour drops them, and the nodes before it see only that nothing returns. So a
peer is also avoided if most of its microbatches are lost while most of the others' are kept. Losses that hit all peers
alike count against none.

A peer is avoided for twice as long each time. Nothing of this is sent to others. A microbatch that others report as
dropped counts as a loss for the peer that it was sent to. To have an honest peer avoided, liars must make three
quarters of all its microbatches fail, and less than half of the others', so a minority of liars cannot.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field

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
# Peers that are remembered: twice the links of a node (`pipeline.MAX_LINKS`).
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
    """A node's memory of its neighbours in the pipeline. Outlives the trainer."""

    def __init__(self) -> None:
        self._of = OrderedDict[bytes, _Record]()

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
        record = self._of.setdefault(peer, _Record())
        self._of.move_to_end(peer)
        while len(self._of) > MAX_PEERS:
            self._of.popitem(last=False)
        return record
