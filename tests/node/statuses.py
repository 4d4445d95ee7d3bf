"""A status to render and to serve in tests."""

from __future__ import annotations

import msgspec

from farandole.node.status.status import ExchangeStatus, MemberStatus, NodeStatus, RunStatus
from farandole.protocol.rounds.pairing_events import ExchangeEnded
from farandole.protocol.rounds.training_events import RoundEnd
from farandole.protocol.trainer.trainer_messages import Contributed
from farandole.protocol.wire.identity import peer_id_of

ALICE = "12D3KooWPexrH79BHenTqWcGfyd8U9ZzX9LYthJM72n2PH1jRzfK"
BOB = peer_id_of(b"b" * 32)
NOW = 1_000_000.0

_MEMBER = MemberStatus(
    peer_id=ALICE,
    is_live=True,
    is_self=True,
    has_left=False,
    round=7,
    inner_steps=350,
    tokens=716_800,
    tokens_per_second=9_500.0,
    loss=2.5,
    device="cpu",
    addresses=[f"/ip4/127.0.0.1/tcp/4001/p2p/{ALICE}", f"/ip4/192.168.1.5/tcp/4001/p2p/{ALICE}"],
    is_connected=False,
    path="",
    last_seen_seconds=None,
)

STATUS = NodeStatus(
    version="0.1.0",
    peer_id=ALICE,
    pid=4242,
    started_at=NOW - 185,
    addresses=_MEMBER.addresses,
    phase="training",
    phase_detail="inner steps of round 7",
    phase_since=NOW - 3,
    is_member=True,
    round=7,
    inner_steps=350,
    inner_steps_this_round=12,
    tokens=716_800,
    tokens_per_second=9_500.0,
    loss=2.5,
    losses=[(r, 5.5 - 0.4 * r) for r in range(7)],
    loss_first=5.5,
    validation=[(5, 2.61)],
    bits_per_byte=1.234,
    device="cpu",
    trainer_pid=4243,
    trainer_restarts=0,
    exchanges_ok=6,
    exchanges_alone=1,
    exchanges_failed=0,
    partners={BOB: 4, "12D3KooWcarol": 2},
    bytes_sent=12_000_000,
    bytes_received=12_100_000,
    last_exchange=ExchangeStatus(6, BOB, "committed", 2_000_000, 2_000_000, 0.21, NOW - 4),
    waits_for="",
    connected_peers=2,
    run=RunStatus("ab" * 32, "demo", 3, 1, 2_100_000, 28_000.0, 2.55, 2.5, 2.6, "cd" * 16),
    members=[
        _MEMBER,
        msgspec.structs.replace(
            _MEMBER,
            peer_id=BOB,
            is_self=False,
            is_connected=True,
            path="direct",
            last_seen_seconds=1.2,
            addresses=["/ip4/127.0.0.1/tcp/4002", "/ip4/192.168.1.6/tcp/4002"],
        ),
        msgspec.structs.replace(_MEMBER, peer_id="12D3KooWgone", is_self=False, is_live=False, last_seen_seconds=99.0),
    ],
    warnings=["the trainer died; starting it again"],
    warned_at=[NOW - 78],
    paths={"bulk": 5, "stream": 1},
)


def round_end(round_index: int, *exchanges: ExchangeEnded, alone: str = "", loss: float = 4.0) -> RoundEnd:
    """Return the end of a round of five inner steps."""
    return RoundEnd(Contributed(round_index, 8, 640, 640, 5, 5, 640, loss, 2.5, 0), exchanges, alone)


def ended(
    round_index: int,
    peer: bytes,
    failure: str = "",
    *,
    bytes_sent: int = 0,
    bytes_received: int = 0,
    seconds: float = 0.0,
    path: str = "",
) -> ExchangeEnded:
    """Return an exchange of a round, committed unless there is a ``failure``."""
    return ExchangeEnded(
        bytes(16),
        peer,
        not failure,
        reason=failure,
        round=round_index,
        bytes_sent=bytes_sent,
        bytes_received=bytes_received,
        seconds=seconds,
        path=path,
    )
