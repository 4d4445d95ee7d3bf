"""The order and time of dials of a peer's addresses."""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections.abc import Iterable

import trio

from farandole.protocol.mesh.relay import parse_circuit
from farandole.protocol.wire.identity import peer_id_of

from ..base.errors import PeerUnreachableError
from .known_addresses import MAX_ADDRESSES
from .yamux import MuxedConn

# A relay carries what cannot go directly: relays are tried when all direct attempts have failed, or have had three
# round trips of the slowest lines.
DIRECT_HEAD_START = 1.0
MAX_DIALLED_ADDRESSES = 3 * MAX_ADDRESSES

_DIALABLE = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/(\d{1,5})(?:/p2p/([^/]+))?")


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


class Dial:
    """One attempt to reach a peer, shared by all callers that dial it."""

    def __init__(self, is_direct: bool, own: Iterable[tuple[str, int]]) -> None:
        """``own``: where this node itself listens; homes behind most routers use the same private addresses."""
        self.is_direct = is_direct
        self._own = frozenset(own)
        self.began_at = trio.current_time()
        self.done = trio.Event()
        self.news = trio.Event()  # another address, or the end of an attempt
        self.addresses: list[str] = []
        self.winner: tuple[str, MuxedConn] | None = None
        self.failures: list[str] = []
        self.error: PeerUnreachableError | None = None
        self._tried: set[str] = set()

    def offer(self, addresses: Iterable[str]) -> None:
        """Add addresses to try."""
        fresh = [address for address in addresses if address not in self.addresses]
        self.addresses += fresh[: MAX_DIALLED_ADDRESSES - len(self.addresses)]
        self.news.set()

    def _alternating(self, peer: bytes) -> list[str]:
        """Return the direct addresses as RFC 8305, section 4, orders them: IPv6 and others in turn."""
        direct = [a for a in self.addresses if (t := dial_target(a, peer)) is not None and t not in self._own]
        ipv6 = [address for address in direct if address.startswith("/ip6/")]
        others = [address for address in direct if not address.startswith("/ip6/")]
        return [a for pair in itertools.zip_longest(ipv6, others) for a in pair if a is not None]

    def next_address(self, peer: bytes, *, is_trying: bool) -> str | None:
        """Return the next address to try now, if any; relays come after the direct ones."""
        if (address := self._first_untried(self._alternating(peer))) is not None:
            return address
        if self.is_direct or (is_trying and trio.current_time() < self.began_at + DIRECT_HEAD_START):
            return None
        return self._first_untried(address for address in self.addresses if is_circuit_to(address, peer))

    def _first_untried(self, addresses: Iterable[str]) -> str | None:
        """Return the first address that was not tried yet, which then counts as tried."""
        address = next((address for address in addresses if address not in self._tried), None)
        if address is not None:
            self._tried.add(address)
        return address
