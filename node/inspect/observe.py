"""A run as a visitor sees it, for its public page."""

from __future__ import annotations

from typing import Final

from farandole.protocol.run.presets import num_parameters
from farandole.protocol.state.board import Board
from farandole.protocol.state.entries import Beat, Kind, Member, Notice
from farandole.protocol.state.node_state import LOSS_SCALE
from farandole.protocol.wire.identity import peer_id_of

from ..status.public_run import PublicMember, PublicRun
from .peek import Visit

_COMMANDS: Final = {"pause": "paused by its creator", "stop": "stopped by its creator"}


def observe(visit: Visit, board: Board, now: float) -> PublicRun:
    """Return the run at this moment; ``now`` is Unix seconds. The board takes in the members' newest counts."""
    state, live = visit.gossip.state, visit.live()
    board.note(state.entries(Kind.PROGRESS))
    beats = {peer: beat for peer in live if (beat := state.payload(peer, Beat)) is not None}
    losses = [beat.loss / LOSS_SCALE for beat in beats.values() if beat.loss is not None]
    counts = dict(board.counts)
    members = []
    for peer in [*counts, *(live - counts.keys())]:  # newcomers have signed no count yet
        count, member, beat = counts.get(peer), state.payload(peer, Member), beats.get(peer)
        members.append(
            PublicMember(
                peer_id_of(peer),
                _state(member, is_live=peer in live),
                count.tokens if count else 0,
                count.rounds if count else 0,
                float(beat.tokens_per_second) if beat else 0.0,
                member.device if member else "",
            )
        )
    return PublicRun(
        name=visit.manifest.name,
        run_id=board.run_id.hex(),
        parameters=num_parameters(visit.manifest.model),
        at=now,
        live=len(live),
        round=max((beat.round for beat in beats.values()), default=0),
        tokens=board.tokens,
        tokens_per_second=sum(float(beat.tokens_per_second) for beat in beats.values()),
        loss=sum(losses) / len(losses) if losses else None,
        notice=_notice(visit),
        members=members,
    )


def _state(member: Member | None, *, is_live: bool) -> str:
    if is_live:
        return "paused" if member is not None and member.is_paused else "live"
    return "left" if member is not None and member.left else "gone"


def _notice(visit: Visit) -> str:
    """Return what the creator's newest notice says; empty if there is none."""
    notices = list(visit.gossip.state.entries(Kind.NOTICE))
    if not notices:
        return ""
    newest: Notice = max(notices, key=lambda entry: entry.written_at).payload
    return ": ".join(part for part in (_COMMANDS.get(newest.action, ""), newest.text) if part)
