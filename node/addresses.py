"""Which of a node's addresses others can dial."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from farandole.protocol.invite import MAX_ADDRESSES

from .status import NodeStatus


def choose_bootstrap_addresses(status: NodeStatus) -> list[str]:
    """At most 8 addresses for an invite: this node's, and its live members' so that any of them may be away."""
    own = [_with_peer(address, status.peer_id) for address in rank(status.addresses)]
    others = [
        _with_peer(ranked[0], member.peer_id)
        for member in status.members
        if member.is_live and not member.is_self and (ranked := rank(member.addresses))
    ]
    return (own[: MAX_ADDRESSES // 2] + others)[:MAX_ADDRESSES]


def _with_peer(address: str, peer_id: str) -> str:
    """Members tell their addresses without their peer id, which the run state has already."""
    return address if address.endswith(f"/p2p/{peer_id}") else f"{address}/p2p/{peer_id}"


def rank(addresses: Sequence[str]) -> list[str]:
    """Those that reach farthest first; loopback is left out unless there is nothing else."""
    ordered = sorted(addresses, key=_distance_class)
    return [address for address in ordered if _distance_class(address) < 3] or ordered


def _distance_class(address: str) -> int:
    """0 for a name or a public IP address, 1 for a relayed one, 2 for a private one, 3 for this machine alone."""
    if "/p2p-circuit" in address:
        return 1
    protocol, _, rest = address.lstrip("/").partition("/")
    if protocol not in ("ip4", "ip6"):
        return 0
    try:
        ip = ipaddress.ip_address(rest.partition("/")[0])
    except ValueError:
        return 3
    return 3 if ip.is_loopback or ip.is_unspecified else 0 if ip.is_global else 2


def multiaddr_of(ip: str, port: int) -> str:
    """An IP address and a TCP port as a multiaddr."""
    return f"/{'ip6' if ':' in ip else 'ip4'}/{ip}/tcp/{port}"
