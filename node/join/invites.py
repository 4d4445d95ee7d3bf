"""Invites to the run of the node that runs on this machine, and the addresses that go into one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from farandole.protocol.run.invite import MAX_ADDRESSES, Invite, InviteError, encode_invite, split_address
from farandole.protocol.wire.errors import ManifestError

from ..base.control import call
from ..mesh.addresses import IPV6, PRIVATE, distance_class, hosts_of, rank
from ..status.status import NodeStatus

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
    ``quota`` others. One for 0 admits no other node: it is for a command of this machine, and the home's key signs for
    that (`farandole.protocol.run.invitations.VisitorPass`). Raises `NoNodeError` if no node runs, `ControlError` if it
    may not invite, and `ManifestError` while it has not found its run.
    """
    node = msgspec.convert(call(home, "status"), NodeStatus)
    if not node.run.run_id:
        raise ManifestError("the node has not found its run yet; `farandole status` says what it waits for")
    seats = {"uses": uses, "expires_at": time.time() + seconds, "quota": quota}
    secret = bytes.fromhex(call(home, "invite", **seats)) if uses else b""
    run_id, network_key = bytes.fromhex(node.run.run_id), bytes.fromhex(call(home, "network_key"))
    return encode_invite(Invite(run_id, tuple(addresses or choose_bootstrap_addresses(node)), secret, network_key))


# Half of an invite is for other members.
MAX_OWN_ADDRESSES: Final = MAX_ADDRESSES // 2


def choose_bootstrap_addresses(status: NodeStatus) -> list[str]:
    """Return at most 8 addresses for an invite: this node's, and one each of a few live members, widest reach first.

    So a newcomer gets in while any of them is there. Members that this node is connected to come first.
    """

    def is_doubted(address: str) -> bool:
        return address.partition("/p2p/")[0] in status.doubted_addresses

    # A run's first node has no peer yet that could test its router's mapping; later, what peers found dead is left out.
    mapped = status.mapped_addresses if status.reachability == "unknown" else []
    own = sorted(_usable([*dict.fromkeys((*status.addresses, *mapped))], status.peer_id), key=is_doubted)
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
    return sorted(rank(list(dict.fromkeys(chosen))[:MAX_ADDRESSES]), key=is_doubted)


def warnings_about(addresses: Sequence[str], doubted: Sequence[str] = ()) -> list[str]:
    """Return a warning if few newcomers, or none, can reach an invite's addresses; ``doubted``: as in `NodeStatus`."""
    if dead := [address for address in doubted if any(each.startswith(f"{address}/p2p/") for each in addresses)]:
        return [
            f"no peer reaches this node at the announced {', '.join(dead)}: if the public one has changed, name the "
            "new one, or a domain, with --announce at the next start; if not, have the router forward that port"
        ]
    nearest = min(map(distance_class, addresses), default=PRIVATE)
    if nearest < IPV6:
        return []
    if nearest == IPV6:
        return [
            "from the internet, this invite works over IPv6 alone: for newcomers who have it, and if the router here "
            "lets the port in; most do not until their owner opens it. For others, use `farandole relay` on a machine "
            "with a public IPv4 address"
        ]
    return [
        f"this invite has only private addresses ({hosts_of(addresses) or 'none'}): it works in this network or on "
        "this machine only. For others: forward a TCP port of the router to this machine, start the node again with "
        "--port PORT --announce /ip4/PUBLIC-IP/tcp/PORT, and make another invite; or start `farandole relay` on a "
        "public machine, and type the `farandole dial` line that it prints here"
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
