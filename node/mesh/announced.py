"""What a host advertises for the addresses that it listens on."""

from __future__ import annotations

import ipaddress
import math

import trio
from multiaddr import Multiaddr
from multiaddr.utils import get_network_addrs

# Interfaces come and go; who asks for our addresses gets an answer no older than this many seconds.
INTERFACES_VALID_FOR = 10.0


class Announced:
    """What to advertise for the addresses that we listen on: 0.0.0.0 stands for every interface."""

    def __init__(self) -> None:
        self._interfaces: dict[str, list[str]] = {}
        self._valid_until = -math.inf

    def __call__(self, listening: list[Multiaddr]) -> list[Multiaddr]:
        """The addresses to tell, for those that the host listens on."""
        announced: dict[str, None] = {}
        for address in map(str, listening):
            _, family, host, rest = address.split("/", 3)
            hosts = self._interfaces_of(family) if ipaddress.ip_address(host).is_unspecified else [host]
            announced.update((f"/{family}/{host}/{rest}", None) for host in hosts)
        return [Multiaddr(address) for address in announced]

    def _interfaces_of(self, family: str) -> list[str]:
        now = trio.current_time()
        if now >= self._valid_until:
            self._valid_until = now + INTERFACES_VALID_FOR
            # Without a network there is still this machine.
            self._interfaces = {
                "ip4": get_network_addrs(4) or ["127.0.0.1"],
                "ip6": get_network_addrs(6) or ["::1"],
            }
        return self._interfaces[family]
