"""Hole punching: which addresses to offer, and which of those offered to dial.

Both ends dial each other at once, from their listening ports, at the addresses that others see of them (DCUtR,
github.com/libp2p/specs, relay/DCUtR.md; RFC 5128, 3.4). A peer cannot make a node dial into the node's own network:
addresses there are dialled only for a peer with the same address on the internet, which is therefore behind the same
router.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from ..wire.ip_addresses import are_neighbours, unicast_ip
from .reachability import HTTPS_PORT, MIN_PORT, Address

DCUTR_PROTOCOL: Final = "/libp2p/dcutr"
# The specification's bound of a message, and of attempts with one peer.
MAX_MESSAGE_BYTES: Final = 4_096
NUM_ATTEMPTS: Final = 3
# The observed addresses, in two families, and a few interfaces for a peer in the same network.
MAX_OFFERED: Final = 8


def offer(observed: Iterable[Address], listening: Iterable[Address]) -> list[Address]:
    """Return the addresses to offer a peer: first the ones that others observe, then the ones we listen at."""
    return list(dict.fromkeys((*observed, *listening)))[:MAX_OFFERED]


def targets(offered: Sequence[Address], observed: Iterable[Address], own: Iterable[str]) -> list[Address]:
    """Choose which offered addresses to dial; ``observed`` is our address as others see it, ``own`` our own IPs."""
    ours, here = {ip for ip, _ in observed}, [ip for text in own if (ip := unicast_ip(text)) is not None]
    is_next_door = any(ip in ours for ip, _ in offered)
    chosen = []
    for text, port in offered[:MAX_OFFERED]:
        ip = unicast_ip(text)
        if ip is None or not (port >= MIN_PORT or port == HTTPS_PORT):
            continue
        if ip.is_global or (is_next_door and any(are_neighbours(ip, other) for other in here)):
            chosen.append((str(ip), port))
    return list(dict.fromkeys(chosen))
