"""IP addresses that peers name: which are unicast, and which are in one network."""

from __future__ import annotations

import ipaddress
from typing import Annotated

import msgspec

# The longest IPv6 address as text, with an IPv4 address in its last part.
MAX_IP_CHARS = 45
# Lower ports belong to system services; a peer must not make a node dial them.
MIN_PORT = 1_024
# Prefix length by IP version: addresses in one network of this size are neighbours.
_NEIGHBOURHOOD = {4: 24, 6: 64}

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Address = tuple[
    Annotated[str, msgspec.Meta(min_length=2, max_length=MAX_IP_CHARS)],
    Annotated[int, msgspec.Meta(ge=MIN_PORT, le=65_535)],
]
"""An IP address as text, and a TCP port."""


def unicast_ip(text: str) -> IpAddress | None:
    """Parse a unicast address, or return None; an IPv4-mapped IPv6 address becomes IPv4, one with a zone is refused."""
    try:
        ip = ipaddress.ip_address(text)
    except ValueError:
        return None
    if ip.version == 6:
        if ip.scope_id is not None:
            return None
        ip = ip.ipv4_mapped or ip
    return None if ip.is_unspecified or ip.is_multicast else ip


def are_neighbours(ip: IpAddress, other: IpAddress) -> bool:
    """Return whether two addresses lie in the same /24 or /64."""
    if ip.version != other.version:
        return False
    shift = ip.max_prefixlen - _NEIGHBOURHOOD[ip.version]
    return int(ip) >> shift == int(other) >> shift
