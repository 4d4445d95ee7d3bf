"""The addresses of peers that a host has heard of, and dials of those that it knows only from other peers.

The limits on such dials, and their reason, are in `farandole.protocol.mesh.dialling`.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Final

import trio

from farandole.protocol.mesh.dialling import DialBudget, may_dial
from farandole.protocol.mesh.relay import parse_circuit

from ..base.errors import PeerUnreachableError
from .addresses import MAX_ADDRESS_CHARS, MAX_ADDRESSES, OwnAddresses, dial_target, is_multiaddr
from .connections import ConnectionPool

# More than a run has members; with 16 addresses each of a hundred bytes, 10 MB.
MAX_KNOWN_PEERS: Final = 4_096


class LatestAddresses:
    """The latest addresses of the peers heard of last."""

    def __init__(self) -> None:
        self._peers: OrderedDict[bytes, dict[str, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._peers)

    def add(self, peer: bytes, addresses: Iterable[str]) -> list[str]:
        """Remember the valid addresses, and return them; new ones replace the oldest."""
        known = self._peers.setdefault(peer, {})
        self._peers.move_to_end(peer)
        good = [address for address in addresses if len(address) <= MAX_ADDRESS_CHARS and is_multiaddr(address)]
        for address in good:
            known.pop(address, None)
            known[address] = None
        while len(known) > MAX_ADDRESSES:
            del known[next(iter(known))]
        while len(self._peers) > MAX_KNOWN_PEERS:
            self._peers.popitem(last=False)
        return good

    def of(self, peer: bytes) -> list[str]:
        """Return the addresses known for a peer, the latest first."""
        return list(reversed(self._peers.get(peer, {})))


class KnownAddresses:
    """What one host knows of where its peers are."""

    def __init__(self, connections: ConnectionPool, own: OwnAddresses) -> None:
        self.trusted = LatestAddresses()
        """From this node's user, or of a connection that was authenticated."""
        self.hearsay = LatestAddresses()
        """From the peers themselves, or from others; these do not displace trusted ones."""
        self._connections = connections
        self._own = own
        self._budget = DialBudget()

    def of(self, peer: bytes) -> list[str]:
        """Return the addresses known for a peer, trusted ones first, the latest first."""
        return list(dict.fromkeys((*self.trusted.of(peer), *self.hearsay.of(peer))))

    def to_keep(self, peer: bytes) -> list[str]:
        """Return the addresses of a peer that may be dialled without caution another day."""
        trusted = self.trusted.of(peer)

        def is_harmless(address: str) -> bool:
            circuit = parse_circuit(address)
            target = (
                dial_target(address, peer) if circuit is None else dial_target(circuit.relay_address, circuit.relay)
            )
            return target is not None and self.allows(*target)

        return [address for address in self.of(peer) if address in trusted or is_harmless(address)]

    def ipv4_target(self, peer: bytes) -> tuple[str, int] | None:
        """Return an IPv4 address of a peer that may be dialled now; None if none is known.

        `succeed` follows if the peer is there.
        """
        for address in self.of(peer):
            target = dial_target(address, peer) if address.startswith("/ip4/") else None
            if target and (address in self.trusted.of(peer) or self._may_try(*target)):
                return target
        return None

    # Dials of hearsay

    def allows(self, host: str, port: int) -> bool:
        """Return whether an address from a peer may be dialled; False for a name, which may resolve elsewhere later."""
        return may_dial(host, port, self._ips_in_use())

    def _may_try(self, host: str, port: int) -> bool:
        """Return whether an address from a peer may be dialled now, and count this as a failure until `succeed`."""
        return self.allows(host, port) and self._budget.take(host, port, trio.current_time())

    async def open(self, target: tuple[str, int]) -> tuple[trio.SocketStream, tuple[str, int]]:
        """Return a TCP connection, and the IP address and port that it leads to.

        A name is resolved, and its IP address is checked. Call `succeed` when the peer has authenticated itself. Raises
        `PeerUnreachableError` if caution forbids the dial now, `OSError` if the dial fails.
        """
        host, port = await self._look_up(*target)
        if not self.allows(host, port):
            raise PeerUnreachableError(f"{host} port {port} is not dialled on a peer's word")
        if not self._budget.take(host, port, trio.current_time()):
            raise PeerUnreachableError(f"nobody has answered at {host} port {port}: it is too early to try again")
        return await trio.open_tcp_stream(host, port), (host, port)

    def succeed(self, host: str, port: int) -> None:
        """Note that a peer has authenticated itself there, the expected one or another."""
        self._budget.succeed(host, port)

    async def _look_up(self, host: str, port: int) -> tuple[str, int]:
        try:
            return str(ipaddress.ip_address(host)), port
        except ValueError:
            found = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
        allowed = (str(ip) for *_, (ip, *_) in found if self.allows(str(ip), port))
        return next(allowed, str(found[0][4][0])), port

    def _ips_in_use(self) -> Iterator[str]:
        """Yield the IP addresses that this node uses: the ones that it has dialled, and the ones that it listens on."""
        for conn in self._connections.live:
            if conn.is_outbound and conn.link.remote is not None and not conn.link.is_relayed:
                yield conn.link.remote[0]
        yield from (ip for ip, _ in self._own.listening)
