"""The dashboard's data: curves over time, and what is sent to the page; it is small, because it is sent every second.

Each node's loss, the run's throughput and the exchanges between nodes are made from successive statuses, so they cost
the network nothing; they begin when the daemon does. All of it is bounded: a full curve drops every other point, and
then takes every other new one.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from farandole.protocol.wire.bounds import Latest

from ...base.figures import loss
from ...status.status import MemberStatus, NodeStatus, RunStatus
from ..headline import Headline, headline
from ..view import Row, member_state, run_row, status_rows, warnings_of

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
    """Points (x, y) with growing x, thinned out when there are too many.

    They are in arrays: as small objects of their own, which stay, they keep a process from returning what is freed
    around them.
    """

    max_points: int
    _xs: array[float] = field(default_factory=lambda: array("d"))
    _ys: array[float] = field(default_factory=lambda: array("d"))
    _stride: int = 1
    _skipped: int = 0

    @property
    def points(self) -> list[Point]:
        """The points, the oldest first."""
        return [*zip(self._xs, self._ys, strict=True)]

    def add(self, x: float, y: float) -> None:
        """Add a newer point; one that is not newer or not finite is left out."""
        if not math.isfinite(y) or (self._xs and x <= self._xs[-1]):
            return
        self._skipped += 1
        if self._xs and self._skipped < self._stride:
            return
        self._skipped = 0
        self._xs.append(x)
        self._ys.append(y)
        if len(self._xs) >= self.max_points:
            del self._xs[1::2], self._ys[1::2]
            self._stride *= 2


class NodeMeeting(msgspec.Struct, frozen=True, array_like=True):
    """Two nodes averaged."""

    at: float
    """Unix seconds at which it was seen."""
    round: int
    one: str
    """Peer ids."""
    other: str


@dataclass(slots=True)
class RunHistory:
    """The run as this node has seen it since it began."""

    losses: Latest[str, Curve] = field(default_factory=lambda: Latest(MAX_CURVES))
    """Peer id -> (round, training loss) of the nodes that were live last."""
    mean_loss: Curve = field(default_factory=lambda: Curve(MAX_POINTS))
    """(Unix seconds, mean of the live nodes' losses)."""
    validation: Curve = field(default_factory=lambda: Curve(MAX_POINTS))
    """(round, this node's loss on held-out text)."""
    throughput: Curve = field(default_factory=lambda: Curve(MAX_POINTS))
    """(Unix seconds, tokens a second of the whole run)."""
    meetings: Latest[tuple[int, frozenset[str]], NodeMeeting] = field(default_factory=lambda: Latest(MAX_EXCHANGES))
    """The newest, by round and peer ids: either node may report it."""
    _last_rounds: Latest[str, int] = field(default_factory=lambda: Latest(MAX_CURVES))

    def observe(self, run: RunStatus, members: Sequence[MemberStatus], validation: Sequence[Point], now: float) -> None:
        """Take in the present moment; ``now`` is Unix seconds."""
        self.throughput.add(now, run.tokens_per_second)
        if run.loss_mean is not None:
            self.mean_loss.add(now, run.loss_mean)
        for round_index, held_out in validation[-1:]:
            self.validation.add(round_index, held_out)
        for member in members:
            if not member.is_live:
                continue
            # Each is part of many meetings.
            peer, partner = sys.intern(member.peer_id), sys.intern(member.last_partner)
            before = self._last_rounds.get(peer)
            self._last_rounds[peer] = member.round
            if member.loss is not None:
                curve = self.losses[peer] = self.losses.get(peer) or Curve(MAX_POINTS_A_NODE)
                curve.add(member.round, member.loss)
            met = member.round, frozenset((peer, partner))
            if before not in (None, member.round) and partner and met not in self.meetings:
                self.meetings[met] = NodeMeeting(now, member.round, peer, partner)


# More curves in one picture are a blur; the page draws these, and the mean of all.
MAX_CURVES_SHOWN = 32


class Overview(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The run and its curves, without the members; and what concerns one node, which a public page leaves out."""

    now: float
    """Unix seconds, by the node's clock."""
    headline: Headline
    summary: str
    """The run's row of the status."""
    run: RunStatus
    mean_loss: list[Point]
    throughput: list[Point]
    rows: list[Row] | None = None
    """The rows of the status without its warnings, and without the run's."""
    warnings: list[str] | None = None
    """Each with its age, newest last."""
    status: NodeStatus | None = None
    """Its members and its run are left out."""
    validation: list[Point] | None = None


class MemberView(msgspec.Struct, frozen=True):
    """A row of the table of members."""

    member: MemberStatus
    state: str
    """``this node``, ``live``, ``paused``, ``gone``, ``left``."""
    remark: str


class MembersView(msgspec.Struct, frozen=True):
    """The members and the data of their charts."""

    members: list[MemberView]
    curves: dict[str, list[Point]]
    meetings: list[NodeMeeting]


class PublicView(msgspec.Struct, frozen=True):
    """All that the page shows in its public mode, in which it reads this from a file and has no node to ask."""

    overview: Overview
    members: MembersView


def overview(status: NodeStatus, history: RunHistory, now: float) -> Overview:
    """Return the overview of the present moment."""
    return Overview(
        now=now,
        headline=headline(status, now),
        summary=run_row(status.run).value,
        run=status.run,
        mean_loss=history.mean_loss.points,
        throughput=history.throughput.points,
        rows=[row for row in status_rows(status, now) if row.label not in ("warning", "the run")],
        warnings=warnings_of(status, now),
        status=msgspec.structs.replace(status, members=[], losses=[], validation=[]),
        validation=history.validation.points,
    )


def public_view(
    run: RunStatus, members: Sequence[MemberStatus], notice: str, history: RunHistory, now: float
) -> PublicView:
    """Return what anybody may see; ``notice``: the creator's words, or empty."""
    newest = max((member.round for member in members if member.is_live), default=0)
    text = f"{run.members_live} live, round {newest}, loss {loss(run.loss_mean)}"
    shown = Overview(
        now=now,
        headline=Headline("well" if run.members_live else "busy", text, notice),
        summary=run_row(run).value,
        run=run,
        mean_loss=history.mean_loss.points,
        throughput=history.throughput.points,
    )
    return PublicView(shown, members_view(members, history, {}))


def members_view(members: Sequence[MemberStatus], history: RunHistory, remarks: Mapping[str, str]) -> MembersView:
    """Return all members, with the curves of the first few live ones."""
    live = [member.peer_id for member in members if member.is_live and member.peer_id in history.losses]
    return MembersView(
        members=[
            MemberView(
                member,
                state="this node" if member.is_self else member_state(member)[0],
                remark=remarks.get(member.peer_id, ""),
            )
            for member in members
        ],
        curves={peer: history.losses[peer].points for peer in live[:MAX_CURVES_SHOWN]},
        meetings=list(history.meetings.values()),
    )
