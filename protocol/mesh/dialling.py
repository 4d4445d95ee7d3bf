"""Which addresses to dial on a peer's word, and how often; and which to offer and dial to punch a hole.

Any peer may claim any address: a printer's in this home, or a third party's that many nodes would then dial. So others'
claims lead to addresses on the internet, and into a network of this machine only next to an address that this node has
dialled before, or listens at by address. Well-known ports are never dialled. An address where no peer proves its
identity is tried a few times, and then after longer and longer pauses, whichever peer is claimed to be there: so a
third party gets few connections from the whole run.

Addresses from this node's user (an invite, a setting), and addresses where a peer has proved its identity, need no
caution.

To punch a hole, both ends dial each other at once, from their listening ports, at the addresses that others see of them
(DCUtR, github.com/libp2p/specs, relay/DCUtR.md; RFC 5128, 3.4). A peer cannot make a node dial into the node's own
network: addresses there are dialled only for a peer with the same address on the internet, which is therefore behind
the same router.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Final

import msgspec

from ..wire.bounds import Latest

# The longest IPv6 address as text, with an IPv4 address in its last part.
MAX_IP_CHARS = 45
# Lower ports belong to system services; a peer must not make a node dial them.
MIN_PORT = 1_024
# The only one of them that a peer may make a witness, or the other end of a hole, dial.
HTTPS_PORT: Final = 443
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


# Failed attempts in a row at one port, and at one machine or IPv6 network (one customer has 2^64 addresses); then the
# pauses in seconds, which double.
FREE_OF_PORT, FREE_OF_IP = 4, 16
FIRST_PAUSE, MAX_PAUSE = 30.0, 3_600.0
# Targets that are remembered, the latest ones.
MAX_TARGETS: Final = 8_192

DCUTR_PROTOCOL: Final = "/libp2p/dcutr"
# The specification's bound of a message, and of attempts with one peer.
MAX_MESSAGE_BYTES: Final = 4_096
NUM_ATTEMPTS: Final = 3
# The observed addresses, in two families, and a few interfaces for a peer in the same network.
MAX_OFFERED: Final = 8


def is_open_to_peers(port: int) -> bool:
    """Return whether a port may be dialled because a peer asks for that."""
    return port >= MIN_PORT or port == HTTPS_PORT


def may_dial(ip_text: str, port: int, in_use: Iterable[str]) -> bool:
    """Return whether to dial an address claimed by a peer; ``in_use``: addresses that this node dials or listens at."""
    ip = unicast_ip(ip_text)
    return ip is not None and MIN_PORT <= port < 65_536 and may_lead_to(ip, in_use)


def may_lead_to(ip: IpAddress, near: Iterable[str]) -> bool:
    """Return whether a peer's word may lead to an address: on the internet, or in the same /24 or /64 as a near one."""
    if ip.is_global:
        return True
    width = _NEIGHBOURHOOD[ip.version]
    network = ipaddress.ip_network((ip, width), strict=False)
    return any(other in network for text in near if (other := unicast_ip(text)) is not None)


class DialBudget:
    """Counts of failed attempts, by target. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._vain = Latest[tuple[str, int], tuple[int, float]](MAX_TARGETS)
        """(IP address, port), or (machine, 0) for all of its ports -> (attempts in a row, time of the last one)."""

    def take(self, ip: str, port: int, now: float) -> bool:
        """Count an attempt as failed unless `succeed` follows; return False if it is too early for another one."""
        counts = {}
        for target, free in (((ip, port), FREE_OF_PORT), ((_machine(ip), 0), FREE_OF_IP)):
            counts[target], last_at = self._vain.get(target, (0, -math.inf))
            vain = counts[target] - free
            if vain >= 0 and now < last_at + min(FIRST_PAUSE * 2.0 ** min(vain, 30), MAX_PAUSE):
                return False
        for target, count in counts.items():
            self._vain[target] = (count + 1, now)
        return True

    def succeed(self, ip: str, port: int) -> None:
        """Note that a peer has proved its identity at this target."""
        self._vain.pop((ip, port), None)
        self._vain.pop((_machine(ip), 0), None)


def _machine(ip: str) -> str:
    """Return an IPv4 address, or the /64 of an IPv6 address."""
    return str(ipaddress.ip_network(f"{ip}/64", strict=False)) if ":" in ip else ip


def offer(observed: Iterable[Address], listening: Iterable[Address]) -> list[Address]:
    """Return the addresses to offer a peer: first the ones that others observe, then the ones we listen at."""
    return list(dict.fromkeys((*observed, *listening)))[:MAX_OFFERED]


def targets(offered: Sequence[Address], observed: Iterable[Address], own: Iterable[str]) -> list[Address]:
    """Choose which offered addresses to dial; ``observed`` is our address as others see it, ``own`` our own IPs."""
    is_next_door = not {ip for ip, _ in offered}.isdisjoint(ip for ip, _ in observed)
    near = tuple(own) if is_next_door else ()
    parsed = [(unicast_ip(text), port) for text, port in offered[:MAX_OFFERED] if is_open_to_peers(port)]
    return list(dict.fromkeys((str(ip), port) for ip, port in parsed if ip is not None and may_lead_to(ip, near)))
