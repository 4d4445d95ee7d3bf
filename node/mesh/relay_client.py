"""Uses relays, to be reached and to reach others: the client's part of Circuit Relay v2.

Relays are reached directly, never through another relay, so that no two nodes wait for each other. A relay's claim
about the peer at the other end proves nothing: the handshake over the circuit does.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
from farandole.protocol.wire.identity import peer_id_bytes, peer_id_of, public_key_of_bytes, short_name

from ..base.errors import PeerUnreachableError
from .addresses import distance_class
from .circuit import Circuit
from .delimited import encode_delimited, multiaddr_texts, receive_message
from .libp2p_parts import HopMessage, PeerId, RelayStatus, StopMessage

if TYPE_CHECKING:
    from .host import Host
    from .libp2p_stream import Libp2pStream

logger = logging.getLogger(__name__)

# To dial a relay, ask it, and have it ask the peer: three round trips in addition to a dial.
CIRCUIT_TIMEOUT = 7.0
RESERVE_TIMEOUT = 8.0
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

    def __init__(self, host: Host) -> None:
        self._host = host
        self._reservations: dict[bytes, Reservation] = {}
        self._shaking_hands: Counter[bytes] = Counter()  # by relay
        host.set_handler(STOP_PROTOCOL, self._accept)

    @property
    def reservations(self) -> list[Reservation]:
        """The valid reservations: not expired, and with the relay connected."""
        now = trio.current_time()
        return [
            held for held in self._reservations.values() if held.expires_at > now and self._host.is_direct(held.relay)
        ]

    async def reserve(self, relay: bytes) -> Reservation:
        """Ask a relay for a reservation, or to renew one.

        Raises `PeerUnreachableError` if it refuses, or `RemoteProtocolError`.
        """
        try:
            with trio.fail_after(RESERVE_TIMEOUT):
                await self._host.connect(relay, is_direct=True)
                stream, answer = await self._ask(relay, HopMessage(type=HopMessage.RESERVE))
        except (trio.TooSlowError, trio.BrokenResourceError) as error:
            raise PeerUnreachableError(f"{short_name(relay)} gives no answer to a reservation") from error
        stream.reset()
        address = self._address_of(relay, multiaddr_texts(answer.reservation.addrs))
        if address is None:
            raise PeerUnreachableError(f"{short_name(relay)} has no address that others could dial")
        expires_at = trio.current_time() + seconds_left(answer.reservation.expire, time.time())
        held = self._reservations[relay] = Reservation(relay, circuit_address(address, relay), expires_at)
        return held

    def forget(self, relay: bytes) -> None:
        """Accept nothing more from a relay, without notifying it; its reservation lapses."""
        self._reservations.pop(relay, None)

    async def _ask(self, relay: bytes, question: HopMessage) -> tuple[Libp2pStream, HopMessage]:
        """Return the stream on which a relay has agreed, and its answer; raise `PeerUnreachableError` if it refuses."""
        stream = await self._host.open_stream(relay, HOP_PROTOCOL)
        try:
            await stream.send_all(encode_delimited(question))
            answer = await receive_message(stream, HopMessage, MAX_MESSAGE_BYTES)
            if answer.type != HopMessage.STATUS or answer.status != RelayStatus.OK:
                raise PeerUnreachableError(f"the relay {short_name(relay)} refuses (status {answer.status})")
        except BaseException:  # also when cancelled: the relay must not keep a circuit that no task uses
            stream.reset()
            raise
        return stream, answer

    def _address_of(self, relay: bytes, told: Iterable[str]) -> str | None:
        """Return the relay's address for others: the one that reaches farthest of those that it reports.

        Of equals it is the one that we dialled, if any. Few peers lack IPv4, and many lack IPv6.
        """
        known = [address.partition("/p2p/")[0] for address in told]
        dialled = [address for address in self._host.remote_addresses(relay) if address in known]
        for address in sorted((*dialled, *known), key=distance_class):
            if parse_circuit(circuit_address(address, relay)) is not None:
                return address
        return None

    async def open_circuit(self, peer: bytes, address: str, *, is_hearsay: bool = False) -> Circuit:
        """Open a circuit to a peer through the relay in the address; raise `PeerUnreachableError` if that fails.

        ``is_hearsay``: the relay's address comes from other peers.
        """
        target = parse_circuit(address)
        if target is None:
            raise PeerUnreachableError(f"no relay is named in {address}")
        relay = target.relay
        try:
            with trio.fail_after(CIRCUIT_TIMEOUT):
                relay_address = f"{target.relay_address}/p2p/{peer_id_of(relay)}"
                await self._host.connect(relay, [relay_address], CIRCUIT_TIMEOUT, is_direct=True, is_hearsay=is_hearsay)
                peer_id = PeerId(id=peer_id_bytes(peer))
                stream, answer = await self._ask(relay, HopMessage(type=HopMessage.CONNECT, peer=peer_id))
        except (RemoteProtocolError, trio.TooSlowError, trio.BrokenResourceError) as error:
            raise PeerUnreachableError(f"the relay {short_name(relay)} does not connect us: {error!r}") from error
        where = address.partition("/p2p-circuit")[0] + "/p2p-circuit"
        return Circuit(stream, where, answer.limit.data, answer.limit.duration)

    async def _accept(self, stream: Libp2pStream) -> None:
        """Accept a circuit that a relay offers: do the handshake, and keep the circuit while the connection lasts."""
        relay = stream.peer
        is_busy = self._shaking_hands[relay] >= MAX_HANDSHAKES_PER_RELAY
        if relay not in self._reservations or stream.is_relayed or is_busy:
            raise RemoteProtocolError("no reservation leads here")
        self._shaking_hands[relay] += 1
        try:
            with trio.fail_after(CIRCUIT_TIMEOUT):
                request = await receive_message(stream, StopMessage, MAX_MESSAGE_BYTES)
                if not request.HasField("type") or request.type != StopMessage.CONNECT:
                    raise RemoteProtocolError("a relay answers what nobody asked")
                public_key_of_bytes(request.peer.id)  # refuses a peer without a name in farandole
                await stream.send_all(encode_delimited(StopMessage(type=StopMessage.STATUS, status=RelayStatus.OK)))
            circuit = Circuit(stream, self._reservations[relay].address)
            try:
                muxed = await self._host.upgrader.accept(circuit)
            except Exception as error:  # whatever the handshakes raise
                raise RemoteProtocolError(f"no handshake through a relay: {error!r}") from error
        finally:
            self._shaking_hands -= Counter((relay,))
        conn = await self._host.connections.add(muxed, is_outbound=False)
        await conn.finished.wait()
