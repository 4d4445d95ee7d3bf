"""Reaches peers for a host: connects, and opens streams, with its own implementation of "happy eyeballs" (RFC 8305).

Every address of a peer is tried, each 150 ms after the previous one, or at once when that one failed. The first that
is authenticated and multiplexed wins. Relays are reached directly, never through another relay, so that no two nodes
wait for each other.

It is also a relay's client, and can be reached through it (Circuit Relay v2). A relay's claim about the peer at the
other end proves nothing: the handshake over the circuit does.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

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

from ..base.errors import PeerUnreachableError, StrangerError
from ..base.streams import DIAL_TIMEOUT, counted, expecting_answer
from .addresses import MAX_ADDRESSES, KnownAddresses, OwnAddresses, dial_target, distance_class, is_circuit_to
from .connections import ConnectionPool, ProtocolHandlers
from .gate import Gate
from .libp2p_parts import (
    HopMessage,
    PeerId,
    RelayStatus,
    StopMessage,
    encode_delimited,
    multiaddr_texts,
    receive_message,
)
from .links import RawLink, Socket, connect_from
from .yamux import Libp2pStream, MuxedConn, Upgrader

logger = logging.getLogger(__name__)

# Between two addresses of one peer: RFC 8305 recommends 250 ms and allows 100.
DIAL_STAGGER = 0.15
# Pauses, in seconds, before further attempts at an address whose node hangs up before it has authenticated itself. Each
# is multiplied by 0.5 to 1.5.
REDIAL_PAUSES = (0.1, 0.2, 0.4, 0.4)
# To dial a relay, ask it, and have it ask the peer: three round trips in addition to a dial.
CIRCUIT_TIMEOUT = 7.0
# A relay carries what cannot go directly: relays are tried when all direct attempts have failed, or have had three
# round trips of the slowest lines.
DIRECT_HEAD_START = 1.0
MAX_DIALLED_ADDRESSES = 3 * MAX_ADDRESSES
# A relay asks for every peer that dials us; limit on unfinished handshakes of one relay.
MAX_HANDSHAKES_PER_RELAY = 16
# No relay grants less: if it seems so, one of the two clocks is wrong, and the node asks again after this time.
MIN_RESERVATION_SECONDS = 60.0

M = TypeVar("M", HopMessage, StopMessage)


class Circuit(RawLink):
    """A stream to a relay, which copies it to a peer and back, in the place of a TCP socket.

    The connection over it shapes its own traffic, as every connection does. So the stream below is not shaped, and has
    lower priority than what this node sends to the relay itself.
    """

    is_relayed = True

    def __init__(self, stream: Libp2pStream, address: str) -> None:
        """``address``: the other end, a multiaddr with ``/p2p-circuit`` at its end."""
        super().__init__(stream, address, None)
        stream.is_bulk = True
        self._stream = stream

    def abort(self) -> None:
        """See `RawLink`."""
        self._stream.reset()


class Dial:
    """One attempt to reach a peer, shared by all callers that dial it."""

    def __init__(self, is_direct: bool) -> None:
        """``is_direct``: no relay is tried."""
        self.is_direct = is_direct
        self.began_at = trio.current_time()
        self.done = trio.Event()
        self.news = trio.Event()  # another address, or the end of an attempt
        self.tried: set[str] = set()
        self.winner: tuple[str, MuxedConn] | None = None
        self.failures: list[str] = []
        self.error: PeerUnreachableError | None = None

    def next_address(
        self, peer: bytes, known: Sequence[str], own: Collection[tuple[str, int]], *, is_trying: bool
    ) -> str | None:
        """Return the next of the known addresses to try now, if any.

        IPv6 and other addresses come in turn (RFC 8305, section 4), and relays after the direct ones. ``own``: where
        this node itself listens; homes behind most routers use the same private addresses.
        """
        direct = [a for a in known if (target := dial_target(a, peer)) is not None and target not in own]
        ipv6 = [address for address in direct if address.startswith("/ip6/")]
        others = [address for address in direct if not address.startswith("/ip6/")]
        candidates = [a for pair in itertools.zip_longest(ipv6, others) for a in pair if a is not None]
        if not (self.is_direct or (is_trying and trio.current_time() < self.began_at + DIRECT_HEAD_START)):
            candidates += [address for address in known if is_circuit_to(address, peer)]
        address = next((address for address in candidates if address not in self.tried), None)
        if address is None or len(self.tried) >= MAX_DIALLED_ADDRESSES:
            return None
        self.tried.add(address)
        return address


@dataclass(eq=False)
class Dialler:
    """One host's dials; part of `farandole.node.mesh.host.Host`."""

    author: bytes
    """This node."""
    nursery: trio.Nursery
    """Runs the dials."""
    connections: ConnectionPool
    upgrader: Upgrader
    own: OwnAddresses
    gate: Gate
    """Opens the streams."""
    _dials: dict[tuple[bytes, bool], Dial] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.known = KnownAddresses(self.own, self.connections.dialled_ips)

    # Addresses

    def add_addresses(self, peer: bytes, addresses: Iterable[str], *, is_hearsay: bool = False) -> None:
        """Remember where a peer may be reached, from this node's user or from a successful connection.

        ``is_hearsay``: from the peer itself or from others; these are dialled with caution. Invalid addresses are
        skipped; new ones replace the oldest. A dial of this peer that is running tries them too.
        """
        self.known.add(peer, addresses, is_hearsay=is_hearsay)
        for is_direct in (False, True):
            if (dial := self._dials.get((peer, is_direct))) is not None:
                dial.news.set()

    # Streams and connections

    async def open_stream(
        self, peer: bytes, protocol: str, timeout: float = DIAL_TIMEOUT, *, may_dial: bool = True
    ) -> Libp2pStream:
        """Open a stream, connecting if needed; raise `PeerUnreachableError` if that takes over `timeout` seconds."""
        with expecting_answer(peer, timeout):
            if may_dial:
                await self.connect(peer)
            conn = self.connections.best(peer)
            try:
                return await self.gate.open_stream(conn, protocol)
            except PeerUnreachableError:
                if not may_dial or not conn.muxed.event_closed.is_set():
                    raise
            await self.connect(peer)  # the connection has just ended: another may last
            return await self.gate.open_stream(self.connections.best(peer), protocol)

    async def connect(
        self,
        peer: bytes,
        addresses: Sequence[str] = (),
        timeout: float = DIAL_TIMEOUT,
        *,
        is_direct: bool = False,
        is_hearsay: bool = False,
    ) -> None:
        """Return once there is a connection; `PeerUnreachableError` if there is none in `timeout` seconds.

        ``is_direct``: a relayed connection does not count. ``is_hearsay``: the addresses come from other peers.
        """
        if addresses:
            self.add_addresses(peer, addresses, is_hearsay=is_hearsay)

        def is_done() -> bool:
            return self.connections.is_direct(peer) if is_direct else bool(self.connections.of(peer))

        if self.connections.is_shut_out(peer):
            raise PeerUnreachableError(f"{peer_id_of(peer)} is kept out for a while")
        with expecting_answer(peer, timeout):
            while not is_done():
                dial = self._dials.get((peer, is_direct))  # shared with all callers that dial it now
                if dial is None:
                    dial = self._dials[peer, is_direct] = Dial(is_direct)
                    self.nursery.start_soon(self._run, peer, dial)
                await dial.done.wait()
                if dial.error is not None and not is_done():
                    raise PeerUnreachableError(str(dial.error))

    async def _run(self, peer: bytes, dial: Dial) -> None:
        is_adopted = False
        try:
            if peer == self.author:
                raise PeerUnreachableError("this is myself")
            if self.connections.is_offline:
                raise PeerUnreachableError("this node is offline for now")
            with trio.move_on_after(DIAL_TIMEOUT):
                await self._race(peer, dial)
            if dial.winner is None:
                reasons = "; ".join(dial.failures) or "no address of it is known, or none answered"
                raise PeerUnreachableError(f"cannot reach {peer_id_of(peer)}: {reasons}")
            address, muxed = dial.winner
            self.add_addresses(peer, [address])
            is_adopted = True
            await self.connections.add(muxed, is_outbound=True)
        except PeerUnreachableError as error:
            dial.error = error
        except Exception as error:  # no exception of the library leaves
            dial.error = PeerUnreachableError(f"cannot reach {peer_id_of(peer)}: {error!r}")
        finally:
            if dial.winner is not None and not is_adopted:  # cancelled as soon as it was there
                dial.winner[1].link.abort()
            del self._dials[peer, dial.is_direct]
            dial.done.set()

    async def _race(self, peer: bytes, dial: Dial) -> None:
        async def attempt(address: str) -> None:
            for pause in (*REDIAL_PAUSES, None):
                try:
                    muxed = await self.dial_one(peer, address)
                except Exception as error:  # the handshakes raise whatever comes when the other end is gone
                    if pause is None or isinstance(error, (OSError, PeerUnreachableError, trio.TooSlowError)):
                        dial.failures.append(f"{address}: {str(error) or repr(error)}")
                        dial.news.set()
                        return
                    logger.debug("%s hung up: %r", address, error)
                    # It hung up at once: a peer refuses some while too many dial it.
                    await trio.sleep(pause * random.uniform(0.5, 1.5))
                else:
                    if dial.winner is None:
                        dial.winner = (address, muxed)
                        nursery.cancel_scope.cancel()
                    else:
                        muxed.link.abort()
                    return

        async with trio.open_nursery() as nursery:
            while True:
                dial.news = trio.Event()
                is_trying = bool(nursery.child_tasks)
                address = dial.next_address(peer, self.known.of(peer), self.own.interfaces, is_trying=is_trying)
                if address is not None:
                    nursery.start_soon(attempt, address)
                    with trio.move_on_after(DIAL_STAGGER):
                        await dial.news.wait()
                elif is_trying:
                    with trio.move_on_after(DIRECT_HEAD_START):
                        await dial.news.wait()
                else:
                    return

    # One address

    async def dial_one(self, peer: bytes, address: str) -> MuxedConn:
        """Return a connection to a peer at this address that no task runs yet; raise any error of the dial."""
        target, is_trusted = dial_target(address, peer), self.known.is_trusted(peer, address)
        if target is None:
            through = parse_circuit(address)
            if through is None:
                raise PeerUnreachableError(f"no relay is named in {address}")
            with expecting_answer(relay := through.relay, CIRCUIT_TIMEOUT):
                at = [f"{through.relay_address}/p2p/{peer_id_of(relay)}"]
                await self.connect(relay, at, CIRCUIT_TIMEOUT, is_direct=True, is_hearsay=not is_trusted)
                question = HopMessage(type=HopMessage.CONNECT, peer=PeerId(id=peer_id_bytes(peer)))
                stream = await self.open_stream(relay, HOP_PROTOCOL)
                await agree(stream, question)
            circuit = Circuit(stream, address.partition("/p2p-circuit")[0] + "/p2p-circuit")
            return await self.upgrader.upgrade(circuit, peer, is_initiator=True)
        if is_trusted:
            return await self.upgrader.upgrade(Socket(await trio.open_tcp_stream(*target)), peer, is_initiator=True)
        connected, reached = await self.known.open(target)
        try:
            muxed = await self.upgrader.upgrade(Socket(connected), peer, is_initiator=True)
        except StrangerError:  # the address is a node's all the same, so no third party is bothered
            self.known.budget.succeed(*reached)
            raise
        self.known.budget.succeed(*reached)
        return muxed

    async def dial_from_listener(self, target: tuple[str, int], port: int | None = None) -> Socket:
        """Return a TCP connection from the listening port, not authenticated yet; raise `OSError` if it fails.

        ``port``: dial from this port instead, over IPv4.
        """
        for local in self.own.listening if port is None else [("0.0.0.0", port)]:
            if (":" in local[0]) == (":" in target[0]):
                return Socket(await connect_from(local, target))
        raise OSError(f"nothing listens here that could dial {target[0]}")


async def agree(stream: Libp2pStream, question: M) -> M:
    """Ask a relay, or the target of a circuit; return its answer, or raise `PeerUnreachableError` if it refuses.

    The stream is reset if there is no answer that agrees.
    """
    try:
        await stream.send_all(encode_delimited(question))
        answer = await receive_message(stream, type(question), MAX_MESSAGE_BYTES)
        if answer.type != question.STATUS or answer.status != RelayStatus.OK:
            raise PeerUnreachableError(f"{short_name(stream.peer)} refuses (status {answer.status})")
    except BaseException:  # also when cancelled: the other end must not keep a circuit that no task uses
        stream.reset()
        raise
    return answer


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
