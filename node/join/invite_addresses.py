"""The addresses that go into an invite."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final

from farandole.protocol.run.invite import MAX_ADDRESSES, InviteError, split_address

from ..mesh.addresses import IPV6, PRIVATE, distance_class, rank
from ..status.status import NodeStatus

# Half of an invite is for other members.
MAX_OWN_ADDRESSES: Final = MAX_ADDRESSES // 2


def choose_bootstrap_addresses(status: NodeStatus) -> list[str]:
    """Return at most 8 addresses for an invite: this node's, and one each of a few live members, widest reach first.

    So a newcomer gets in while any of them is there. Members that this node is connected to come first.
    """
    # A run's first node has no peer yet that could test its router's mapping; later, what peers found dead is left out.
    mapped = status.mapped_addresses if status.reachability == "unknown" else []
    own = _usable([*dict.fromkeys((*status.addresses, *mapped))], status.peer_id)
    members = sorted(
        (member for member in status.members if member.is_live and not member.is_self),
        key=lambda member: not member.is_connected,
    )
    of_others = [_usable(member.addresses, member.peer_id) for member in members]
    others = [address for addresses in of_others for address in addresses[:1]]
    # The node that makes the invite is there: one address of its own stays in, however many members reach farther. So
    # does one over IPv6: some newcomers have nothing else.
    ipv6 = [address for addresses in (own, *of_others) for address in addresses if distance_class(address) == IPV6]
    chosen = own[:1] + ipv6[:1] + sorted(own[1:MAX_OWN_ADDRESSES] + others, key=distance_class)
    return rank(list(dict.fromkeys(chosen))[:MAX_ADDRESSES])


def warnings_about(addresses: Sequence[str]) -> list[str]:
    """Return a warning if few newcomers from the internet, or none, can reach any of an invite's addresses."""
    nearest = min(map(distance_class, addresses), default=PRIVATE)
    if nearest < IPV6:
        return []
    if nearest == IPV6:
        return [
            "from the internet, this invite works over IPv6 alone: for newcomers who have it, and if the router here "
            "lets the port in; most do not until their owner opens it. For others, use `farandole relay` on a machine "
            "with a public IPv4 address"
        ]
    hosts = ", ".join(dict.fromkeys(address.split("/")[2] for address in addresses if address.count("/") > 1))
    return [
        f"this invite has only private addresses ({hosts or 'none'}): it works in this network or on this machine "
        "only. For others: forward a TCP port of the router to this machine, start the node again with --port PORT "
        "--announce /ip4/PUBLIC-IP/tcp/PORT, and make another invite; or start `farandole relay` on a public machine, "
        "and type the `farandole dial` line that it prints here"
    ]


def _usable(addresses: Sequence[str], peer_id: str) -> list[str]:
    """Return the usable addresses in the order of `rank`, with the peer id, which members' addresses lack."""
    found = []
    for address in rank(addresses):
        complete = address if address.endswith(f"/p2p/{peer_id}") else f"{address}/p2p/{peer_id}"
        with contextlib.suppress(InviteError):
            split_address(complete)
            found.append(complete)
    return found
