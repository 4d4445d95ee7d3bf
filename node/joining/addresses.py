"""Which of a node's addresses others can dial."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Sequence
from typing import Final

from farandole.protocol.invite import MAX_ADDRESSES, InviteError, split_address

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
    chosen = own[:1] + sorted(own[1:MAX_OWN_ADDRESSES] + others, key=_distance_class)
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


def rank(addresses: Sequence[str]) -> list[str]:
    """Those that reach farthest first; loopback is left out unless there is nothing else."""
    ordered = sorted(addresses, key=_distance_class)
    return [address for address in ordered if _distance_class(address) < 3] or ordered


def _distance_class(address: str) -> int:
    """0 for a name or a public IP address, 1 for a relayed one, 2 for a private one, else 3: loopback, nonsense."""
    if "/p2p-circuit" in address:
        return 1
    protocol, _, rest = address.lstrip("/").partition("/")
    if protocol not in ("ip4", "ip6"):
        return 0 if protocol in ("dns", "dns4", "dns6") else 3
    try:
        ip = ipaddress.ip_address(rest.partition("/")[0])
    except ValueError:
        return 3
    return 3 if ip.is_loopback or ip.is_unspecified else 0 if ip.is_global else 2


def multiaddr_of(ip: str, port: int) -> str:
    """An IP address and a TCP port as a multiaddr."""
    return f"/{'ip6' if ':' in ip else 'ip4'}/{ip}/tcp/{port}"
