"""An invite to the run of the node that runs on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from farandole.protocol.run.invite import Invite, encode_invite
from farandole.protocol.wire.errors import ManifestError

from ..base.control import call
from ..status.status import NodeStatus
from .invite_addresses import choose_bootstrap_addresses

# An invite to a run of invited members is good for a week by default.
INVITE_SECONDS: Final = 7 * 86_400.0


def own_invite(
    home: Path,
    addresses: Sequence[str] | None = None,
    *,
    uses: int = 1,
    seconds: float = INVITE_SECONDS,
    quota: int = 0,
) -> str:
    """Make an invite to the run of the node that runs here, with its own addresses if none are given.

    If the run is for invited members, it is for ``uses`` of them. They have ``seconds`` to join, and each may invite
    ``quota`` others. Raises `NoNodeError` if no node runs, `ControlError` if it may not invite, and `ManifestError`
    while it has not found its run.
    """
    node = _running_node(home)
    secret = bytes.fromhex(call(home, "invite", uses=uses, expires_at=time.time() + seconds, quota=quota))
    return _encode_invite(home, node, addresses, secret)


def visit_invite(home: Path) -> str:
    """Make an invite for a command of this machine, to the run of the node that runs here: it admits no other node.

    The home's key signs for the command (`farandole.protocol.run.invitations.VisitorPass`). Raises as `own_invite`.
    """
    return _encode_invite(home, _running_node(home), None, b"")


def _running_node(home: Path) -> NodeStatus:
    status = msgspec.convert(call(home, "status"), NodeStatus)
    if not status.run.run_id:
        raise ManifestError("the node has not found its run yet; `farandole status` says what it waits for")
    return status


def _encode_invite(home: Path, node: NodeStatus, addresses: Sequence[str] | None, secret: bytes) -> str:
    run_id, network_key = bytes.fromhex(node.run.run_id), bytes.fromhex(call(home, "network_key"))
    return encode_invite(Invite(run_id, tuple(addresses or choose_bootstrap_addresses(node)), secret, network_key))
