"""The data that is sent to the page; it is small, because it is sent every second."""

from __future__ import annotations

import msgspec

from ...status.status import MemberStatus, NodeStatus
from ..headline import Headline, headline
from ..rows import Row, member_state, status_rows
from .history import NodeMeeting, Point, RunHistory

# More curves in one picture are a blur; the page draws these, and the mean of all.
MAX_CURVES_SHOWN = 32
# Fields of a member that its row has too.
_COPIED = ("peer_id", "stage", "round", "tokens", "tokens_per_second", "loss", "device")


class Overview(msgspec.Struct, frozen=True):
    """The status and its curves, without the members."""

    now: float
    """Unix seconds, by the node's clock."""
    headline: Headline
    rows: list[Row]
    """The rows of the status without its warnings."""
    status: NodeStatus
    """Its members are left out."""
    mean_loss: list[Point]
    throughput: list[Point]
    validation: list[Point]


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
    """How others reach it, as it announces: ``public``, ``relay``, or empty."""
    device: str
    seen: float | None


class MembersView(msgspec.Struct, frozen=True):
    """The members and the data of their charts."""

    members: list[MemberView]
    curves: dict[str, list[Point]]
    meetings: list[NodeMeeting]


def overview(status: NodeStatus, history: RunHistory, now: float) -> Overview:
    """Return the overview of the present moment."""
    return Overview(
        now=now,
        headline=headline(status, now),
        rows=[row for row in status_rows(status, now) if row.label != "warning"],
        status=msgspec.structs.replace(status, members=[], losses=[], validation=[]),
        mean_loss=history.mean_loss.points,
        throughput=history.throughput.points,
        validation=history.validation.points,
    )


def members_view(status: NodeStatus, history: RunHistory) -> MembersView:
    """Return all members, with the curves of the first few live ones."""
    live = [member.peer_id for member in status.members if member.is_live and member.peer_id in history.losses]
    return MembersView(
        members=[_member(member) for member in status.members],
        curves={peer: history.losses[peer].points for peer in live[:MAX_CURVES_SHOWN]},
        meetings=list(history.meetings),
    )


def _member(member: MemberStatus) -> MemberView:
    is_relayed = any("/p2p-circuit" in address for address in member.addresses)
    return MemberView(
        **{name: getattr(member, name) for name in _COPIED},
        state="this node" if member.is_self else member_state(member)[0],
        link=member.path if member.is_connected else "",
        reach="relay" if is_relayed else "public" if member.addresses else "",
        seen=member.last_seen_seconds,
    )
