"""Being reached, and reaching others, through relays: the client's part of Circuit Relay v2.

Relays are reached directly, never through another relay, so that no two nodes wait for each other. What a relay says
of the peer at the other end proves nothing: the handshake over the circuit does.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from farandole.protocol.errors import RemoteProtocolError
from farandole.protocol.identity import peer_id_of, short_name
from farandole.protocol.relay import (
    HOP_PROTOCOL,
    RESERVATION_SECONDS,
    STOP_PROTOCOL,
    Status,
    circuit_address,
    parse_circuit,
)

from ..base.errors import PeerUnreachableError
from .circuit import Circuit
from .relay_messages import (
    ConnectRequest,
    RelayAnswer,
    ReserveRequest,
    encode_hop,
    encode_stop,
    receive_hop,
    receive_stop,
)

if TYPE_CHECKING:
    from .host import Host
    from .libp2p_stream import Stream

logger = logging.getLogger(__name__)

# To dial a relay, ask it, and have it ask the peer: three round trips beside a dial.
CIRCUIT_TIMEOUT = 7.0
RESERVE_TIMEOUT = 8.0
# A relay asks again and again for as long as others dial us; so many handshakes of one relay at once are let through.
MAX_HANDSHAKES_PER_RELAY = 16
# No relay gives less: who is told so has a wrong clock, or the relay has, and asks again as soon as that.
MIN_RESERVATION_SECONDS = 60.0


@dataclass(frozen=True)
class Reservation:
    """Held with a relay for as long as the connection to it lasts."""

    relay: bytes
    address: str
    """Where it makes us reachable, without our peer id."""
    expires_at: float
    """On trio's clock."""


def seconds_left(answer: RelayAnswer, unix: float) -> float:
    """How long a reservation lasts: the protocol has it in the relay's time of day, which need not be ours."""
    return min(max(answer.expires_at - unix, MIN_RESERVATION_SECONDS), RESERVATION_SECONDS)


class RelayClient:
    """One host's circuits and reservations; part of `farandole.node.mesh.host.Host`."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._reservations: dict[bytes, Reservation] = {}
        self._num_shaking_hands: dict[bytes, int] = {}
        host.set_handler(STOP_PROTOCOL, self._accept)

    @property
    def reservations(self) -> list[Reservation]:
        """Those that hold: not expired, and the relay connected."""
        now = trio.current_time()
        return [
            held for held in self._reservations.values() if held.expires_at > now and self._host.is_direct(held.relay)
        ]

    async def reserve(self, relay: bytes) -> Reservation:
        """Ask a relay to pass others on to us, or to go on with it.

        Raises `PeerUnreachableError` if it does not, or `RemoteProtocolError`.
        """
        try:
            with trio.fail_after(RESERVE_TIMEOUT):
                answer = await self._ask_for_reservation(relay)
        except (trio.TooSlowError, trio.BrokenResourceError) as error:
            raise PeerUnreachableError(f"{short_name(relay)} gives no answer to a reservation") from error
        if answer.status != Status.OK:
            raise PeerUnreachableError(f"{short_name(relay)} gives no reservation ({answer.status})")
        address = self._address_of(relay, answer.addresses)
        if address is None:
            raise PeerUnreachableError(f"{short_name(relay)} has no address that others could dial")
        held = Reservation(
            relay, circuit_address(address, relay), trio.current_time() + seconds_left(answer, time.time())
        )
        self._reservations[relay] = held
        return held

    def forget(self, relay: bytes) -> None:
        """Accept nothing more from a relay, which is not told; its reservation lapses."""
        self._reservations.pop(relay, None)

    async def _ask_for_reservation(self, relay: bytes) -> RelayAnswer:
        await self._host.connect(relay, is_direct=True)
        stream = await self._host.open_stream(relay, HOP_PROTOCOL)
        try:
            await stream.send_all(encode_hop(ReserveRequest()))
            answer = await receive_hop(stream)
        finally:
            stream.reset()
        if not isinstance(answer, RelayAnswer):
            raise RemoteProtocolError("a relay asks instead of answering")
        return answer

    def _address_of(self, relay: bytes, told: tuple[str, ...]) -> str | None:
        """Where others shall dial the relay: as we did if we did, else as it says itself."""
        known = [address.partition("/p2p/")[0] for address in told]
        dialled = [address for address in self._host.remote_addresses(relay) if address in known]
        for address in (*dialled, *known):
            if parse_circuit(circuit_address(address, relay)) is not None:
                return address
        return None

    async def open_circuit(self, peer: bytes, address: str) -> Circuit:
        """A circuit to a peer through the relay that the address names; `PeerUnreachableError` if there is none."""
        target = parse_circuit(address)
        if target is None:
            raise PeerUnreachableError(f"no relay is named in {address}")
        relay = target.relay
        try:
            with trio.fail_after(CIRCUIT_TIMEOUT):
                relay_address = f"{target.relay_address}/p2p/{peer_id_of(relay)}"
                await self._host.connect(relay, [relay_address], CIRCUIT_TIMEOUT, is_direct=True)
                stream = await self._host.open_stream(relay, HOP_PROTOCOL, CIRCUIT_TIMEOUT)
                try:
                    await stream.send_all(encode_hop(ConnectRequest(peer)))
                    answer = await receive_hop(stream)
                    if not isinstance(answer, RelayAnswer) or answer.status != Status.OK:
                        raise PeerUnreachableError(f"the relay {short_name(relay)} does not connect us: {answer}")
                except BaseException:  # cancelled, too: the relay is to know that nobody waits
                    stream.reset()
                    raise
        except (RemoteProtocolError, trio.TooSlowError, trio.BrokenResourceError) as error:
            raise PeerUnreachableError(f"the relay {short_name(relay)} does not connect us: {error!r}") from error
        where = address.partition("/p2p-circuit")[0] + "/p2p-circuit"
        return Circuit(stream, where, answer.max_bytes, answer.max_seconds)

    async def _accept(self, stream: Stream) -> None:
        """A relay passes somebody on to us: shake hands, and keep the circuit for as long as the connection."""
        relay = stream.peer
        num_under_way = self._num_shaking_hands.get(relay, 0)
        if relay not in self._reservations or stream.is_relayed or num_under_way >= MAX_HANDSHAKES_PER_RELAY:
            raise RemoteProtocolError("no reservation leads here")
        self._num_shaking_hands[relay] = num_under_way + 1
        try:
            with trio.fail_after(CIRCUIT_TIMEOUT):
                request = await receive_stop(stream)
                if not isinstance(request, ConnectRequest):
                    raise RemoteProtocolError("a relay answers what nobody asked")
                await stream.send_all(encode_stop(RelayAnswer(Status.OK)))
            circuit = Circuit(stream, self._reservations[relay].address)
            try:
                muxed = await self._host.upgrader.accept(circuit)
            except Exception as error:  # whatever the handshakes raise
                raise RemoteProtocolError(f"no handshake through a relay: {error!r}") from error
        finally:
            self._num_shaking_hands[relay] -= 1
            if not self._num_shaking_hands[relay]:
                del self._num_shaking_hands[relay]
        conn = await self._host.connections.add(muxed, is_outbound=False)
        await conn.finished.wait()
