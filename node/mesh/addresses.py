"""The order of a node's addresses by how far they reach."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Final

# The `distance_class` of private addresses: from there on, no address leads here from the internet.
PRIVATE: Final = 2


def rank(addresses: Sequence[str]) -> list[str]:
    """Sort addresses by reach, the farthest first; leave loopback out unless there is nothing else."""
    ordered = sorted(addresses, key=distance_class)
    return [address for address in ordered if distance_class(address) < 3] or ordered


def distance_class(address: str) -> int:
    """Return 0 for a name or a public IP address, 1 if relayed, 2 if private, else 3: loopback, nonsense."""
    if "/p2p-circuit" in address:
        return 1
    protocol, _, rest = address.lstrip("/").partition("/")
    if protocol not in ("ip4", "ip6"):
        return 0 if protocol in ("dns", "dns4", "dns6") else 3
    try:
        ip = ipaddress.ip_address(rest.partition("/")[0])
    except ValueError:
        return 3
    return 3 if ip.is_loopback or ip.is_unspecified else 0 if ip.is_global else PRIVATE


def multiaddr_of(ip: str, port: int) -> str:
    """Return an IP address and a TCP port as a multiaddr."""
    return f"/{'ip6' if ':' in ip else 'ip4'}/{ip}/tcp/{port}"
