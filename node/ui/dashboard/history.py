"""The dashboard's data over time: each node's loss, the run's throughput, the exchanges between nodes.

It is made from successive statuses, so it costs the network nothing; it begins when the daemon does. All of it is
bounded: a full curve drops every other point, and then takes every other new one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from ...status.status import MemberStatus, RunStatus

# On a page 600 pixels wide more points than these cannot be distinguished.
MAX_POINTS: Final = 512
# Points of one node's curve: many such curves share one chart.
MAX_POINTS_A_NODE: Final = 128
# As many members as the run state has authors.
MAX_CURVES: Final = 4_096
# A round of a thousand nodes.
MAX_EXCHANGES: Final = 512

Point = tuple[float, float]


@dataclass(slots=True)
class Curve:
    """Points (x, y) with growing x, thinned out when there are too many."""

    max_points: int
    points: list[Point] = field(default_factory=list)
    _stride: int = 1
    _skipped: int = 0

    def add(self, x: float, y: float) -> None:
        """Add a newer point; one that is not newer or not finite is left out."""
        if not math.isfinite(y) or (self.points and x <= self.points[-1][0]):
            return
        self._skipped += 1
        if self.points and self._skipped < self._stride:
            return
        self._skipped = 0
        self.points.append((x, y))
        if len(self.points) >= self.max_points:
            del self.points[1::2]
            self._stride *= 2


class NodeMeeting(msgspec.Struct, frozen=True, array_like=True):
    """Two nodes averaged."""

    at: float
    """Unix seconds at which it was seen."""
    round: int
    one: str
    """Peer ids."""
    other: str

    @property
    def key(self) -> tuple[int, frozenset[str]]:
        """The meeting's key, which is the same when either node reports it."""
        return self.round, frozenset((self.one, self.other))


@dataclass(slots=True)
class RunHistory:
    """The run as this node has seen it since it began."""

    losses: dict[str, Curve] = field(default_factory=dict)
    """Peer id -> (round, training loss) of every node that was live, until the run has forgotten it."""
    mean_loss: Curve = field(default_factory=lambda: Curve(MAX_POINTS))
    """(Unix seconds, mean of the live nodes' losses)."""
    validation: Curve = field(default_factory=lambda: Curve(MAX_POINTS))
    """(round, this node's loss on held-out text)."""
    throughput: Curve = field(default_factory=lambda: Curve(MAX_POINTS))
    """(Unix seconds, tokens a second of the whole run)."""
    meetings: deque[NodeMeeting] = field(default_factory=deque)
    """The last `MAX_EXCHANGES`."""
    _known: set[tuple[int, frozenset[str]]] = field(default_factory=set)
    """Round and peer ids of these."""
    _last_rounds: dict[str, int] = field(default_factory=dict)

    def observe(self, run: RunStatus, members: Sequence[MemberStatus], validation: Sequence[Point], now: float) -> None:
        """Take in the present moment; ``now`` is Unix seconds."""
        self.throughput.add(now, run.tokens_per_second)
        if run.loss_mean is not None:
            self.mean_loss.add(now, run.loss_mean)
        for round_index, loss in validation[-1:]:
            self.validation.add(round_index, loss)
        self._observe_members(members, now)

    def _observe_members(self, members: Sequence[MemberStatus], now: float) -> None:
        if len(self._last_rounds) >= MAX_CURVES:  # nodes that the run has forgotten make room
            here = {member.peer_id for member in members}
            self._last_rounds = {peer: index for peer, index in self._last_rounds.items() if peer in here}
            self.losses = {peer: curve for peer, curve in self.losses.items() if peer in here}
        for member in members:
            if not member.is_live:
                continue
            if member.loss is not None and (member.peer_id in self.losses or len(self.losses) < MAX_CURVES):
                curve = self.losses.setdefault(member.peer_id, Curve(MAX_POINTS_A_NODE))
                curve.add(member.round, member.loss)
            self._observe_meeting(member, now)

    def _observe_meeting(self, member: MemberStatus, now: float) -> None:
        before = self._last_rounds.get(member.peer_id)
        if before is None and len(self._last_rounds) >= MAX_CURVES:
            return
        self._last_rounds[member.peer_id] = member.round
        if before is None or before == member.round or not member.last_partner:
            return
        meeting = NodeMeeting(now, member.round, member.peer_id, member.last_partner)
        if meeting.key in self._known:  # its partner has reported it first
            return
        self._known.add(meeting.key)
        self.meetings.append(meeting)
        if len(self.meetings) > MAX_EXCHANGES:
            self._known.discard(self.meetings.popleft().key)
