"""Uses relays to be reached: the client's part of Circuit Relay v2.

(`farandole.node.mesh.dialler` reaches others through relays.) A relay's claim about the peer at the other end proves
nothing: the handshake over the circuit does.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass

import trio

from farandole.protocol.mesh.relay import (
    HOP_PROTOCOL,
    MAX_MESSAGE_BYTES,
    RESERVATION_SECONDS,
    STOP_PROTOCOL,
    circuit_address,
    parse_circuit,
)
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.identity import public_key_of_bytes, short_name

from ..base.errors import PeerUnreachableError
from ..base.streams import DIAL_TIMEOUT, counted, expecting_answer
from .addresses import distance_class
from .connections import ProtocolHandlers
from .dialler import CIRCUIT_TIMEOUT, Circuit, Dialler, agree
from .libp2p_parts import HopMessage, RelayStatus, StopMessage, encode_delimited, multiaddr_texts, receive_message
from .yamux import Libp2pStream

logger = logging.getLogger(__name__)

# A relay asks for every peer that dials us; limit on unfinished handshakes of one relay.
MAX_HANDSHAKES_PER_RELAY = 16
# No relay grants less: if it seems so, one of the two clocks is wrong, and the node asks again after this time.
MIN_RESERVATION_SECONDS = 60.0


@dataclass(frozen=True)
class Reservation:
    """A reservation with a relay, held for as long as the connection to it lasts."""

    relay: bytes
    address: str
    """The address that it gives us, without our peer id."""
    expires_at: float
    """Time on trio's clock."""


def seconds_left(expires_at: int, unix: float) -> float:
    """Return how long a reservation lasts: it expires at a time of the relay's clock, which may differ from ours."""
    return min(max(expires_at - unix, MIN_RESERVATION_SECONDS), RESERVATION_SECONDS)


class RelayClient:
    """One host's circuits and reservations; part of `farandole.node.mesh.host.Host`."""

    def __init__(self, dialler: Dialler, handlers: ProtocolHandlers) -> None:
        self.members: frozenset[bytes] | None = None
        """Live members of this node's run, which may relay, and are relayed for; None: it is in no run, or not yet."""
        self._dialler = dialler
        self._reservations: dict[bytes, Reservation] = {}
        self._shaking_hands: Counter[bytes] = Counter()  # by relay
        handlers.set(STOP_PROTOCOL, self._accept)
        dialler.connections.protect(self.holds)

    @property
    def reservations(self) -> list[Reservation]:
        """The valid reservations: not expired, and with the relay connected. The others are forgotten."""
        now, is_direct = trio.current_time(), self._dialler.connections.is_direct
        for held in list(self._reservations.values()):
            if held.expires_at <= now or not is_direct(held.relay):
                self.forget(held.relay)
        return list(self._reservations.values())

    def holds(self, relay: bytes) -> bool:
        """Return whether there is a reservation with a relay, or was until its connection ended a moment ago."""
        return relay in self._reservations

    async def reserve(self, relay: bytes) -> Reservation:
        """Ask a relay for a reservation, or to renew one; raise `PeerUnreachableError` if it gives none."""
        with expecting_answer(relay, DIAL_TIMEOUT):
            await self._dialler.connect(relay, is_direct=True)
            stream = await self._dialler.open_stream(relay, HOP_PROTOCOL)
            answer = await agree(stream, HopMessage(type=HopMessage.RESERVE))
        stream.reset()
        # Others dial the address that reaches farthest of those that the relay reports; of equals the one that we
        # dialled, if any. Few peers lack IPv4, and many lack IPv6.
        told = [address.partition("/p2p/")[0] for address in multiaddr_texts(answer.reservation.addrs)]
        dialled = [address for address in self._dialler.connections.remote_addresses(relay) if address in told]
        circuits = (circuit_address(address, relay) for address in sorted((*dialled, *told), key=distance_class))
        circuit = next((circuit for circuit in circuits if parse_circuit(circuit) is not None), None)
        if circuit is None:
            raise PeerUnreachableError(f"{short_name(relay)} has no address that others could dial")
        expires_at = trio.current_time() + seconds_left(answer.reservation.expire, time.time())
        self._reservations[relay] = Reservation(relay, circuit, expires_at)
        return self._reservations[relay]

    def forget(self, relay: bytes) -> None:
        """Accept nothing more from a relay, without notifying it; its reservation lapses."""
        self._reservations.pop(relay, None)

    async def _accept(self, stream: Libp2pStream) -> None:
        """Accept a circuit that a relay offers: do the handshake, and keep the circuit while the connection lasts."""
        relay = stream.peer
        is_busy = self._shaking_hands[relay] >= MAX_HANDSHAKES_PER_RELAY
        if not self.holds(relay) or stream.is_relayed or is_busy:
            raise RemoteProtocolError("no reservation leads here")
        with counted(self._shaking_hands, relay):
            with trio.fail_after(CIRCUIT_TIMEOUT):
                request = await receive_message(stream, StopMessage, MAX_MESSAGE_BYTES)
                if not request.HasField("type") or request.type != StopMessage.CONNECT:
                    raise RemoteProtocolError("a relay answers what nobody asked")
                public_key_of_bytes(request.peer.id)  # refuses a peer without a name in farandole
                await stream.send_all(encode_delimited(StopMessage(type=StopMessage.STATUS, status=RelayStatus.OK)))
            circuit = Circuit(stream, self._reservations[relay].address)
            try:
                muxed = await self._dialler.upgrader.upgrade(circuit, None, is_initiator=False)
            except Exception as error:  # whatever the handshakes raise
                raise RemoteProtocolError(f"no handshake through a relay: {error!r}") from error
        conn = await self._dialler.connections.add(muxed, is_outbound=False)
        await conn.finished.wait()
