"""The addresses where a host can be dialled: its listening sockets, and what routers, relays and others add."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import trio
from multiaddr.utils import get_network_addrs

from .addresses import multiaddr_of

# Interfaces come and go; reported addresses are no older than this number of seconds.
INTERFACES_VALID_FOR = 10.0


class OwnAddresses:
    """The addresses of one host."""

    def __init__(self, peer_id: str, bound: Callable[[], Sequence[tuple[str, int]]]) -> None:
        """``bound``: the IP addresses and ports of the listening sockets."""
        self.announced: Sequence[str] = ()
        """Multiaddrs without a peer id that the node's owner announces; they lead here from the internet."""
        self.mapped: dict[int, tuple[str, int]] = {}
        """Ports of this machine -> the outer address that the router maps to them (farandole.node.mesh.mapping)."""
        self.bulk_ports: set[int] = set()
        """Other ports of this machine that peers dial (farandole.node.bulk.negotiation)."""
        self.external: Sequence[str] = ()
        """Multiaddrs without a peer id at which others reach this node, also through relays."""
        self.observed_ips: list[str] = []
        """IP addresses of this node as peers see them, on the internet or in this network."""
        self._peer_id = peer_id
        self._bound = bound
        self._interfaces: dict[bool, list[str]] = {}
        self._valid_until = -math.inf

    @property
    def listening(self) -> list[tuple[str, int]]:
        """The IP addresses and ports that this node listens on, as they were bound."""
        return list(self._bound())

    @property
    def interfaces(self) -> list[tuple[str, int]]:
        """The addresses of `listening`, with 0.0.0.0 and :: replaced by every interface of the family."""
        found = [(ip, port) for host, port in self._bound() for ip in self._interfaces_of(host)]
        if not found:  # without a network there is still this machine
            found = [("::1" if ":" in host else "127.0.0.1", port) for host, port in self._bound()]
        return list(dict.fromkeys(found))

    @property
    def all(self) -> list[str]:
        """Multiaddrs where this node can be dialled, each ending in /p2p/<peer id>."""
        addresses = (*self.announced, *(multiaddr_of(*each) for each in self.interfaces), *self.external)
        return [f"{address}/p2p/{self._peer_id}" for address in dict.fromkeys(addresses)]

    @property
    def all_mapped(self) -> list[str]:
        """Multiaddrs that the router claims lead to this node; no outside peer may have tried them yet."""
        outer = [self.mapped[port] for _, port in self._bound() if port in self.mapped]
        return [f"{multiaddr_of(ip, port)}/p2p/{self._peer_id}" for ip, port in dict.fromkeys(outer)]

    def _interfaces_of(self, host: str) -> list[str]:
        if host not in ("0.0.0.0", "::"):
            return [host]
        now = trio.current_time()
        if now >= self._valid_until:
            self._valid_until = now + INTERFACES_VALID_FOR
            self._interfaces = {False: get_network_addrs(4), True: get_network_addrs(6)}
        return self._interfaces[":" in host]
