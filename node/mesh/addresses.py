"""Addresses as multiaddrs: their order by reach, what may be dialled; where this node and its peers can be dialled."""

from __future__ import annotations

import ipaddress
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import trio
from multiaddr import Multiaddr
from multiaddr.utils import get_network_addrs

from farandole.protocol.mesh.dialling import DialBudget, may_dial
from farandole.protocol.mesh.relay import parse_circuit
from farandole.protocol.wire.bounds import Latest
from farandole.protocol.wire.identity import peer_id_of

from ..base.errors import PeerUnreachableError

# A machine has a few interfaces, in two families, and a relay or two.
MAX_ADDRESSES: Final = 16
# A relayed address of IPv6 has a hundred bytes, one with a name at most 255 more.
MAX_ADDRESS_BYTES: Final = 384
MAX_ADDRESS_CHARS: Final = 512
# More than a run has members; with 16 addresses each of a hundred bytes, 10 MB.
MAX_KNOWN_PEERS: Final = 4_096
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


def hosts_of(addresses: Iterable[str]) -> str:
    """Return the hosts of multiaddrs, each once, for display."""
    return ", ".join(dict.fromkeys(address.split("/")[2] for address in addresses if address.count("/") > 1))


def direct_ips(addresses: Iterable[str]) -> list[str]:
    """Return the IP addresses in multiaddrs, each once, without those of relays."""
    direct = [address.split("/") for address in addresses if "/p2p-circuit" not in address]
    return list(dict.fromkeys(parts[2] for parts in direct if len(parts) > 2 and parts[1] in ("ip4", "ip6")))


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
        """Ports of this machine -> the outer address that the router maps to them (`reach/upnp.py`)."""
        self.bulk_ports: set[int] = set()
        """Other ports of this machine that peers dial (farandole.node.bulk.negotiation)."""
        self.external: Sequence[str] = ()
        """Multiaddrs without a peer id at which others reach this node, also through relays."""
        self.observed_ips: list[str] = []
        """IP addresses of this node as peers see them, on the internet or in this network."""
        self._peer_id = peer_id
        self._interfaces: dict[str, list[str]] = {}
        self._valid_until = -math.inf

    @property
    def interfaces(self) -> list[tuple[str, int]]:
        """The addresses of `listening`, with 0.0.0.0 and :: replaced by every interface of the family."""
        if (now := trio.current_time()) >= self._valid_until:
            self._valid_until = now + INTERFACES_VALID_FOR
            self._interfaces = {"0.0.0.0": get_network_addrs(4), "::": get_network_addrs(6)}
        found = [(ip, port) for host, port in self.listening for ip in self._interfaces.get(host, [host])]
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


class KnownAddresses:
    """What one host knows of where its peers are, and dials of those that it knows only from other peers.

    The limits on such dials, and their reason, are in `farandole.protocol.mesh.dialling`.
    """

    def __init__(self, own: OwnAddresses, dialled_ips: Callable[[], Iterable[str]]) -> None:
        """``dialled_ips``: returns the IP addresses of the direct connections that this node dialled."""
        # Peer -> its addresses, the latest last. Those from the peers themselves, or from others, do not displace the
        # trusted ones, which are from this node's user, or of a connection that was authenticated.
        self._trusted = Latest[bytes, Latest[str, None]](MAX_KNOWN_PEERS)
        self._hearsay = Latest[bytes, Latest[str, None]](MAX_KNOWN_PEERS)
        self._own = own
        self._dialled_ips = dialled_ips
        self.budget = DialBudget()
        """Of cautious dials; its `succeed` notes that a peer has authenticated itself, the expected one or another."""

    def add(self, peer: bytes, addresses: Iterable[str], *, is_hearsay: bool) -> None:
        """Remember the valid ones of a peer's addresses; new ones replace the oldest."""
        peers = self._hearsay if is_hearsay else self._trusted
        peers[peer] = known = peers.get(peer, Latest[str, None](MAX_ADDRESSES))
        for address in addresses:
            if len(address) <= MAX_ADDRESS_CHARS and is_multiaddr(address):
                known[address] = None

    def of(self, peer: bytes) -> list[str]:
        """Return the addresses known for a peer, trusted ones first, the latest first."""
        both = (reversed(peers.get(peer, {})) for peers in (self._trusted, self._hearsay))
        return list(dict.fromkeys(itertools.chain(*both)))

    def is_trusted(self, peer: bytes, address: str) -> bool:
        """Return whether an address of a peer may be dialled without caution."""
        return address in self._trusted.get(peer, {})

    def to_keep(self, peer: bytes) -> list[str]:
        """Return the addresses of a peer that may be dialled without caution another day."""

        def is_harmless(address: str) -> bool:
            circuit = parse_circuit(address)
            target = (
                dial_target(address, peer) if circuit is None else dial_target(circuit.relay_address, circuit.relay)
            )
            return target is not None and self.allows(*target)

        return [address for address in self.of(peer) if self.is_trusted(peer, address) or is_harmless(address)]

    def ipv4_target(self, peer: bytes) -> tuple[str, int] | None:
        """Return an IPv4 address of a peer that may be dialled now; None if none is known.

        `DialBudget.succeed` follows if the peer is there.
        """
        for address in self.of(peer):
            target = dial_target(address, peer) if address.startswith("/ip4/") else None
            if target and (
                self.is_trusted(peer, address)
                or (self.allows(*target) and self.budget.take(*target, trio.current_time()))
            ):
                return target
        return None

    # Dials of hearsay

    def allows(self, host: str, port: int) -> bool:
        """Return whether an address from a peer may be dialled; False for a name, which may resolve elsewhere later."""
        return may_dial(host, port, (*self._dialled_ips(), *self._own.bound_ips))

    async def open(self, target: tuple[str, int]) -> tuple[trio.SocketStream, tuple[str, int]]:
        """Return a TCP connection, and the IP address and port that it leads to.

        A name is resolved, and its IP address is checked. `DialBudget.succeed` follows when the peer has authenticated
        itself. Raises `PeerUnreachableError` if caution forbids the dial now, `OSError` if the dial fails.
        """
        host, port = target
        try:
            host = str(ipaddress.ip_address(host))
        except ValueError:
            found = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
            ips = [str(ip) for *_, (ip, *_) in found]
            host = next((ip for ip in ips if self.allows(ip, port)), ips[0])
        if not self.allows(host, port):
            raise PeerUnreachableError(f"{host} port {port} is not dialled on a peer's word")
        if not self.budget.take(host, port, trio.current_time()):
            raise PeerUnreachableError(f"nobody has answered at {host} port {port}: it is too early to try again")
        return await trio.open_tcp_stream(host, port), (host, port)
