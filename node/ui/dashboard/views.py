"""What the page is told, as small as it can be: it comes every second."""

from __future__ import annotations

import msgspec

from ...status.status import MemberStatus, NodeStatus
from ..headline import headline
from .history import Point, RunHistory

# More curves in one picture are a blur; the page draws these, and the mean of all.
MAX_CURVES_SHOWN = 32


class HeadlineView(msgspec.Struct, frozen=True):
    """The first line."""

    level: str
    text: str
    remedy: str


class Overview(msgspec.Struct, frozen=True):
    """Everything but the members."""

    now: float
    """Unix seconds, by the node's clock."""
    headline: HeadlineView
    status: NodeStatus
    """Its members are left out."""
    mean_loss: list[Point]
    throughput: list[Point]
    validation: list[Point]


class MeetingView(msgspec.Struct, frozen=True, array_like=True):
    """Two nodes averaged; see `farandole.node.ui.dashboard.history.Meeting`."""

    at: float
    round: int
    one: str
    other: str


class MemberView(msgspec.Struct, frozen=True):
    """A row of the table of members."""

    peer_id: str
    state: str
    """``this node``, ``live``, ``paused``, ``gone``, ``left``."""
    stage: int
    round: int
    tokens: int
    tokens_per_second: float
    loss: float | None
    link: str
    """How this node reaches it; empty where it has no connection."""
    reach: str
    """How others do, by what it announces: ``public``, ``relay``, or empty."""
    device: str
    seen: float | None


class MembersView(msgspec.Struct, frozen=True):
    """The members, and what is drawn of them."""

    members: list[MemberView]
    curves: dict[str, list[Point]]
    meetings: list[MeetingView]


def overview(status: NodeStatus, history: RunHistory, now: float) -> Overview:
    """Of this moment."""
    found = headline(status, now)
    return Overview(
        now=now,
        headline=HeadlineView(found.level, found.text, found.remedy),
        status=msgspec.structs.replace(status, members=[], losses=[], validation=[]),
        mean_loss=history.mean_loss.points,
        throughput=history.throughput.points,
        validation=history.validation.points,
    )


def members_view(status: NodeStatus, history: RunHistory) -> MembersView:
    """All members; curves of the first few."""
    live = [member.peer_id for member in status.members if member.is_live and member.peer_id in history.losses]
    return MembersView(
        members=[_member(member) for member in status.members],
        curves={peer: history.losses[peer].points for peer in live[:MAX_CURVES_SHOWN]},
        meetings=[MeetingView(meeting.at, meeting.round, meeting.one, meeting.other) for meeting in history.meetings],
    )


def _member(member: MemberStatus) -> MemberView:
    if member.is_self:
        state = "this node"
    elif member.has_left:
        state = "left"
    elif member.is_live and member.is_paused:
        state = "paused"
    else:
        state = "live" if member.is_live else "gone"
    return MemberView(
        peer_id=member.peer_id,
        state=state,
        stage=member.stage,
        round=member.round,
        tokens=member.tokens,
        tokens_per_second=member.tokens_per_second,
        loss=member.loss,
        link=member.path if member.is_connected else "",
        reach=_reach(member.addresses),
        device=member.device,
        seen=member.last_seen_seconds,
    )


def _reach(addresses: list[str]) -> str:
    if any("/p2p-circuit" in address for address in addresses):
        return "relay"
    return "public" if addresses else ""
