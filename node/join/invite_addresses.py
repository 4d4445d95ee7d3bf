"""The addresses that go into an invite."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final

from farandole.protocol.invite import MAX_ADDRESSES, InviteError, split_address

from ..mesh.addresses import distance_class, rank
from ..status.status import NodeStatus

# Half of an invite is for other members.
MAX_OWN_ADDRESSES: Final = MAX_ADDRESSES // 2


def choose_bootstrap_addresses(status: NodeStatus) -> list[str]:
    """At most 8 addresses for an invite: this node's, and one each of a few live members, the farthest-reaching first.

    So a newcomer gets in while any of them is there. Of members, those come first that this node is connected to.
    """
    # The first of a run has nobody yet to try whether its router does as it says; later, what peers found dead is out.
    mapped = status.mapped_addresses if status.reachability == "unknown" else []
    own = _usable([*dict.fromkeys((*status.addresses, *mapped))], status.peer_id)
    members = sorted(
        (member for member in status.members if member.is_live and not member.is_self),
        key=lambda member: not member.is_connected,
    )
    others = [address for member in members for address in _usable(member.addresses, member.peer_id)[:1]]
    # Whoever makes the invite is there: one address of its own stays in, however many members reach farther.
    chosen = own[:1] + sorted(own[1:MAX_OWN_ADDRESSES] + others, key=distance_class)
    return rank(chosen[:MAX_ADDRESSES])


def _usable(addresses: Sequence[str], peer_id: str) -> list[str]:
    """In the order of `rank`, with the peer id, which members' addresses lack; without what no invite can hold."""
    found = []
    for address in rank(addresses):
        complete = address if address.endswith(f"/p2p/{peer_id}") else f"{address}/p2p/{peer_id}"
        with contextlib.suppress(InviteError):
            split_address(complete)
            found.append(complete)
    return found
