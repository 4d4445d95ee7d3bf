"""Relaying: a relay's limits, its reservations and circuits, and addresses through a relay.

Circuit Relay v2 (github.com/libp2p/specs, relay/circuit-v2.md): a node behind NAT *reserves* with a relay, over a
connection that it keeps; others ask the relay to *connect* them to it, and the relay copies bytes between two streams,
a *circuit*, over which both ends then speak Noise and yamux. The relay sees which peers communicate, and ciphertext.

Every public node is a relay by default, so the load on each must stay small: the limits suit a home line with a public
address, and there are many relays.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

from ..wire.errors import RemoteProtocolError
from ..wire.identity import peer_id_of, public_key_of

HOP_PROTOCOL: Final = "/libp2p/circuit/relay/0.2.0/hop"
STOP_PROTOCOL: Final = "/libp2p/circuit/relay/0.2.0/stop"
# The specification's bound of a message.
MAX_MESSAGE_BYTES: Final = 4_096
# go-libp2p's too. A reservation ends with its connection anyway; its renewal costs one round trip.
RESERVATION_SECONDS: Final = 3_600
# go-libp2p's limits of a circuit: enough for two peers to make a direct connection, or to introduce themselves.
STRANGERS_CIRCUIT_BYTES: Final = 128 * 1024
STRANGERS_CIRCUIT_SECONDS: Final = 120

_CIRCUIT = re.compile(
    r"(/(?:ip4|ip6|dns|dns4|dns6)/[^/]+/tcp/\d{1,5})/p2p/([^/]+)/p2p-circuit(?:/p2p/([^/]+))?", re.ASCII
)


class Status(IntEnum):
    """A relay's answer, as the specification numbers them."""

    OK = 100
    RESERVATION_REFUSED = 200
    RESOURCE_LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    NO_RESERVATION = 204
    MALFORMED_MESSAGE = 400
    UNEXPECTED_MESSAGE = 401


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one relay."""

    # Each is a connection of the 512 that a node has.
    max_reservations: int = 64
    # Several homes may be behind one carrier's NAT. An attacker needs max_reservations divided by this many addresses
    # to fill the table alone.
    max_reservations_per_address: int = 8
    # Each may hold a window of half a mebibyte in either direction: 64 MiB when all stall.
    max_circuits: int = 64
    # A node keeps connections with twelve members, and exchanges with others in addition; it has two relays.
    max_circuits_per_peer: int = 16
    reservation_seconds: int = RESERVATION_SECONDS
    # In both directions together. A checkpoint of a billion parameters with its optimizer's state has 12 GB, and
    # exchanges of some gigabytes should rarely reach the end of their circuit: a peer with more to move dials again.
    circuit_bytes: int = 16 * 2**30
    # A link that is lost four times a day, and made again in a second, costs a run nothing; a forgotten one ends.
    circuit_seconds: int = 6 * 3_600
    # A circuit that is unused for this time is closed: the ends of one in use ping every ten seconds.
    idle_seconds: float = 60

    @property
    def for_strangers(self) -> Limits:
        """Return the limits of a circuit of which neither end is a member of the relay's run."""
        return replace(
            self,
            circuit_bytes=min(self.circuit_bytes, STRANGERS_CIRCUIT_BYTES),
            circuit_seconds=min(self.circuit_seconds, STRANGERS_CIRCUIT_SECONDS),
        )


class RelayTable:
    """Reservations and circuits of one relay. ``now`` is any clock that never goes back, in seconds."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.reservations: dict[bytes, tuple[str, float]] = {}
        """Holder -> its address and the end, which may have passed since the last reservation was made."""
        self._circuits: Counter[bytes] = Counter()  # by either end

    @property
    def num_circuits(self) -> int:
        """Return the number of circuits; each has two ends."""
        return self._circuits.total() // 2

    def reserve(self, peer: bytes, address: str, now: float) -> Status:
        """Make or renew a peer's reservation; ``address`` groups peers that count as one network address."""
        self._expire(now)
        others = [held for holder, (held, _) in self.reservations.items() if holder != peer]
        if others.count(address) >= self._limits.max_reservations_per_address:
            return Status.RESERVATION_REFUSED
        if len(others) >= self._limits.max_reservations:
            return Status.RESERVATION_REFUSED
        self.reservations[peer] = (address, now + self._limits.reservation_seconds)
        return Status.OK

    def forget(self, peer: bytes) -> None:
        """Remove the reservation of a peer whose connection is gone."""
        self.reservations.pop(peer, None)

    def open_circuit(self, source: bytes, target: bytes, now: float) -> Status:
        """Count a circuit, which `close_circuit` ends; any answer but OK counts nothing."""
        self._expire(now)
        if source == target:
            return Status.PERMISSION_DENIED
        if target not in self.reservations:
            return Status.NO_RESERVATION
        busiest = max(self._circuits[source], self._circuits[target])
        if self.num_circuits >= self._limits.max_circuits or busiest >= self._limits.max_circuits_per_peer:
            return Status.RESOURCE_LIMIT_EXCEEDED
        self._circuits.update((source, target))
        return Status.OK

    def close_circuit(self, source: bytes, target: bytes) -> None:
        """Uncount a circuit that has ended."""
        self._circuits -= Counter((source, target))

    def _expire(self, now: float) -> None:
        self.reservations = {peer: held for peer, held in self.reservations.items() if held[1] > now}


@dataclass(frozen=True, slots=True)
class CircuitAddress:
    """An address through a relay."""

    relay: bytes
    relay_address: str
    """The relay's own multiaddr, without its peer id."""
    peer: bytes | None
    """The peer that it leads to, if the address names one."""


def parse_circuit(address: str) -> CircuitAddress | None:
    """Parse a multiaddr through one relay over TCP; return None for any other."""
    match = _CIRCUIT.fullmatch(address)
    if match is None:
        return None
    try:
        return CircuitAddress(public_key_of(match[2]), match[1], public_key_of(match[3]) if match[3] else None)
    except RemoteProtocolError:
        return None


def circuit_address(relay_address: str, relay: bytes) -> str:
    """Return the address of a peer with a reservation at a relay; its peer id may follow as ``/p2p/...``."""
    return f"{relay_address}/p2p/{peer_id_of(relay)}/p2p-circuit"
