"""Addresses as multiaddrs: their order by reach, what may be dialled, and where this node itself can be dialled."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Sequence
from typing import Final

import trio
from multiaddr import Multiaddr
from multiaddr.utils import get_network_addrs

from farandole.protocol.mesh.relay import parse_circuit
from farandole.protocol.wire.identity import peer_id_of

# A machine has a few interfaces, in two families, and a relay or two.
MAX_ADDRESSES: Final = 16
# A relayed address of IPv6 has a hundred bytes, one with a name at most 255 more.
MAX_ADDRESS_BYTES: Final = 384
MAX_ADDRESS_CHARS: Final = 512
# Values of `distance_class`. From PRIVATE on, no address leads here from the internet. IPv6 is behind relays, since few
# have it everywhere, and most home routers let nothing in over it until their owner opens a port.
PUBLIC, RELAYED, IPV6, PRIVATE, USELESS = range(5)
# Interfaces come and go; reported addresses are no older than this number of seconds.
INTERFACES_VALID_FOR = 10.0

_DIALABLE = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/(\d{1,5})(?:/p2p/([^/]+))?")


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


def is_multiaddr(address: str) -> bool:
    """Return whether the text is a multiaddr."""
    try:
        return len(Multiaddr(address).to_bytes()) > 0
    except Exception:  # the library parses hostile text with whatever exception comes
        return False


def dial_target(address: str, peer: bytes) -> tuple[str, int] | None:
    """Return host and port of a TCP multiaddr; None for another transport, a relay, another peer, or nonsense."""
    match = _DIALABLE.fullmatch(address)
    if match is None:
        return None
    kind, host, port, peer_id = match.groups()
    if int(port) not in range(1, 65536) or (peer_id is not None and peer_id != peer_id_of(peer)):
        return None
    try:
        if kind.startswith("ip") and ipaddress.ip_address(host).is_unspecified:
            return None
    except ValueError:
        return None
    return host, int(port)


def is_circuit_to(address: str, peer: bytes) -> bool:
    """Return whether this is an address of the peer through a relay that is not the peer itself."""
    circuit = parse_circuit(address)
    return circuit is not None and circuit.peer in (None, peer) and circuit.relay != peer


class OwnAddresses:
    """The addresses of one host."""

    def __init__(self, peer_id: str) -> None:
        self.listening: list[tuple[str, int]] = []
        """The IP addresses and ports that this node listens on, as they were bound."""
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
        self._interfaces: dict[bool, list[str]] = {}
        self._valid_until = -math.inf

    @property
    def interfaces(self) -> list[tuple[str, int]]:
        """The addresses of `listening`, with 0.0.0.0 and :: replaced by every interface of the family."""
        found = [(ip, port) for host, port in self.listening for ip in self._interfaces_of(host)]
        if not found:  # without a network there is still this machine
            found = [("::1" if ":" in host else "127.0.0.1", port) for host, port in self.listening]
        return list(dict.fromkeys(found))

    @property
    def ips(self) -> list[str]:
        """The IP addresses of `interfaces`."""
        return list(dict.fromkeys(ip for ip, _ in self.interfaces))

    @property
    def bound_ips(self) -> list[str]:
        """The IP addresses of `listening`, 0.0.0.0 and :: for all of this machine's."""
        return list(dict.fromkeys(ip for ip, _ in self.listening))

    @property
    def all(self) -> list[str]:
        """Multiaddrs where this node can be dialled, each ending in /p2p/<peer id>."""
        addresses = (*self.announced, *(multiaddr_of(*each) for each in self.interfaces), *self.external)
        return [f"{address}/p2p/{self._peer_id}" for address in dict.fromkeys(addresses)]

    @property
    def all_mapped(self) -> list[str]:
        """Multiaddrs that the router claims lead to this node; no outside peer may have tried them yet."""
        outer = [self.mapped[port] for _, port in self.listening if port in self.mapped]
        return [f"{multiaddr_of(ip, port)}/p2p/{self._peer_id}" for ip, port in dict.fromkeys(outer)]

    def _interfaces_of(self, host: str) -> list[str]:
        if host not in ("0.0.0.0", "::"):
            return [host]
        now = trio.current_time()
        if now >= self._valid_until:
            self._valid_until = now + INTERFACES_VALID_FOR
            self._interfaces = {False: get_network_addrs(4), True: get_network_addrs(6)}
        return self._interfaces[":" in host]
