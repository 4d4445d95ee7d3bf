"""The data that is sent to the page; it is small, because it is sent every second."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...base.figures import loss
from ...status.status import MemberStatus, NodeStatus, RunStatus
from ..headline import Headline, headline
from ..rows import Row, member_state, run_row, status_rows
from .history import NodeMeeting, Point, RunHistory

# More curves in one picture are a blur; the page draws these, and the mean of all.
MAX_CURVES_SHOWN = 32
# Fields of a member that its row has too.
_COPIED = ("peer_id", "stage", "round", "tokens", "tokens_per_second", "loss", "device")


class RunOverview(msgspec.Struct, frozen=True, kw_only=True):
    """The run and its curves, without the members: all that a public page has of them."""

    now: float
    """Unix seconds, by the node's clock."""
    headline: Headline
    summary: str
    """The run's row of the status."""
    run: RunStatus
    mean_loss: list[Point]
    throughput: list[Point]


class Overview(RunOverview, frozen=True, kw_only=True):
    """The same, and what concerns the node itself."""

    rows: list[Row]
    """The rows of the status without its warnings, and without the run's."""
    status: NodeStatus
    """Its members and its run are left out."""
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


class PublicView(msgspec.Struct, frozen=True):
    """All that the page shows in its public mode, in which it reads this from a file and has no node to ask."""

    overview: RunOverview
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
        status=msgspec.structs.replace(status, members=[], losses=[], validation=[]),
        validation=history.validation.points,
    )


def public_view(
    run: RunStatus, members: Sequence[MemberStatus], notice: str, history: RunHistory, now: float
) -> PublicView:
    """Return what anybody may see; ``notice``: the creator's words, or empty."""
    newest = max((member.round for member in members if member.is_live), default=0)
    text = f"{run.members_live} live, round {newest}, loss {loss(run.loss_mean)}"
    shown = RunOverview(
        now=now,
        headline=Headline("well" if run.members_live else "busy", text, notice),
        summary=run_row(run).value,
        run=run,
        mean_loss=history.mean_loss.points,
        throughput=history.throughput.points,
    )
    return PublicView(shown, members_view(members, history))


def members_view(members: Sequence[MemberStatus], history: RunHistory) -> MembersView:
    """Return all members, with the curves of the first few live ones."""
    live = [member.peer_id for member in members if member.is_live and member.peer_id in history.losses]
    return MembersView(
        members=[_member(member) for member in members],
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
