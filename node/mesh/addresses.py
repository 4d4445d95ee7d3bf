"""The order of a node's addresses by how far they reach."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

# Values of `distance_class`. From PRIVATE on, no address leads here from the internet. IPv6 is behind relays, since few
# have it everywhere, and most home routers let nothing in over it until their owner opens a port.
PUBLIC, RELAYED, IPV6, PRIVATE, USELESS = range(5)


def rank(addresses: Sequence[str]) -> list[str]:
    """Sort addresses by reach, the farthest first; leave loopback out unless there is nothing else."""
    ordered = sorted(addresses, key=distance_class)
    return [address for address in ordered if distance_class(address) < USELESS] or ordered


def distance_class(address: str) -> int:
    """Return `PUBLIC` for a name or a public IPv4 address, `USELESS` for loopback and nonsense, or one in between."""
    if "/p2p-circuit" in address:
        return RELAYED
    protocol, _, rest = address.lstrip("/").partition("/")
    if protocol not in ("ip4", "ip6"):
        return PUBLIC if protocol in ("dns", "dns4", "dns6") else USELESS
    try:
        ip = ipaddress.ip_address(rest.partition("/")[0])
    except ValueError:
        return USELESS
    if ip.is_loopback or ip.is_unspecified:
        return USELESS
    return PRIVATE if not ip.is_global else IPV6 if ip.version == 6 else PUBLIC


def multiaddr_of(ip: str, port: int) -> str:
    """Return an IP address and a TCP port as a multiaddr."""
    return f"/{'ip6' if ':' in ip else 'ip4'}/{ip}/tcp/{port}"
