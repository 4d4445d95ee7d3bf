"""This node's place in the mesh: connections to peers, streams on them, and who provides what.

Peers are public keys here, and no exception of libp2p leaves (who else imports it, says ARCHITECTURE.md). TCP, Noise
and yamux only: py-libp2p's QUIC loses data, its mplex is slow, and TLS would only add a second way in.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.abc import INetConn, INetStream
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.network.stream.net_stream import NetStream
from libp2p.peer.id import ID
from libp2p.rcmgr import Direction
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
from multiaddr import Multiaddr

from farandole.protocol.errors import RemoteProtocolError
from farandole.protocol.identity import peer_id_of, public_bytes

from ..base.bandwidth import Shaping
from ..base.errors import ListenError, PeerUnreachableError, StrangerError
from ..base.nurseries import open_service_nursery
from .announced import Announced
from .circuit import Circuit
from .connection_events import ConnectionEvents, ConnectionNotifee
from .dht import Dht
from .dial_plan import dial_target
from .dialler import DIAL_TIMEOUT, Dialler
from .known_addresses import MAX_ADDRESSES, KnownAddresses
from .libp2p_names import id_of, peer_of
from .libp2p_stream import Stream
from .reach.aside import Asides
from .relay_client import RelayClient
from .reuse import connect_from
from .workarounds.connection import CLOSE_TIMEOUT, MendedConn
from .workarounds.host import MendedHost
from .workarounds.peers import BoundedPeers
from .workarounds.sockets import Socket
from .workarounds.swarm import HANDSHAKE_TIMEOUT, MendedSwarm
from .workarounds.upgrading import make_upgrader
from .yamux import MuxedConn, MuxedStream

if TYPE_CHECKING:
    from collections.abc import Iterable

logger = logging.getLogger(__name__)

PING_INTERVAL = 10.0
PING_TIMEOUT = 10.0


def is_relayed(connection: INetConn) -> bool:
    """Whether a relay carries a connection."""
    return "/p2p-circuit" in str(connection.get_transport_addresses())


class Host:
    """This node among its peers; made by `open_host`."""

    def __init__(self, author: bytes, libp2p: MendedHost, swarm: MendedSwarm, nursery: trio.Nursery) -> None:
        self.author = author
        self.peer_id = peer_id_of(author)
        self._libp2p = libp2p
        self._swarm = swarm
        self._known = KnownAddresses()
        self._hearsay = KnownAddresses()
        self._dialler = Dialler(self, nursery)
        self._subscribers: set[ConnectionEvents] = set()
        self._told_connected: set[bytes] = set()
        self._observed_ips: list[str] = []
        self._circuits: WeakKeyDictionary[MuxedConn, Circuit] = WeakKeyDictionary()  # that we dialled
        self._asides = Asides(self._dial_aside, nursery)
        self._news = trio.Event()  # a connection has come or gone
        self.bulk_ports: set[int] = set()
        """Other ports of this machine that peers dial (farandole.node.bulk.negotiation)."""
        self.mapped: dict[int, tuple[str, int]] = {}
        """Ports of this machine -> the outer address that the router maps to them (farandole.node.mesh.mapping)."""
        self.observe_port: Callable[[int], AbstractAsyncContextManager[list[tuple[str, int]]]] = lambda port: (
            nullcontext([])
        )
        """As whom others see a port of this machine that is in use, where its router changes ports; else nothing."""
        self.is_offline = False
        """Whether `go_offline` was the last word."""
        self._needs: list[Callable[[bytes], bool]] = []
        self.is_out_of_reach: Callable[[bytes], bool] = lambda peer: False
        """Whether `farandole.node.mesh.reach.punching` has shown that no direct connection to a peer comes about."""
        swarm.unread_budget.is_needed = self._is_needed
        self._dht = Dht(self)
        nursery.start_soon(self._dht.run)
        swarm.dial = self._dial_by_id
        swarm.expected = self._expected_at
        swarm.is_met = lambda peer_id: peer_of(peer_id) in self._expected
        self._expected: dict[bytes, frozenset[str]] = {}
        swarm.register_notifee(ConnectionNotifee(self.note_connection))
        self.relays = RelayClient(self)

    @property
    def addresses(self) -> list[str]:
        """Where this node can be dialled: multiaddrs, each ending in /p2p/<peer id>."""
        return [str(address) for address in self._libp2p.get_addrs()]

    @property
    def mapped_addresses(self) -> list[str]:
        """Where its router says that this node can be dialled, which nobody outside may have tried yet."""
        outer = [self.mapped[port] for _, port in self.listening if port in self.mapped]
        return [f"/ip4/{ip}/tcp/{port}/p2p/{self.peer_id}" for ip, port in dict.fromkeys(outer)]

    # Streams

    def set_handler(self, protocol: str, handler: Callable[[Stream], Awaitable[None]]) -> None:
        """Serve a protocol.

        The stream is closed when the handler returns, and reset when it raises, which is logged unless the error is
        the peer's fault or the network's.
        """

        async def handle(net_stream: INetStream) -> None:
            stream = Stream(cast("NetStream", net_stream), peer_of(net_stream.muxed_conn.peer_id), protocol)
            try:
                await handler(stream)
                await stream.aclose()
            except (RemoteProtocolError, trio.BrokenResourceError, trio.TooSlowError) as error:
                logger.debug("a stream of %s ended: %r", protocol, error)
            except Exception:  # a defect of ours: it costs this stream, and neither the others nor the host
                logger.exception("the handler of %s failed", protocol)
            finally:
                stream.reset()

        self._libp2p.set_stream_handler(TProtocol(protocol), handle)

    def remove_handler(self, protocol: str) -> None:
        """Serve a protocol no more."""
        self._libp2p.remove_stream_handler(TProtocol(protocol))

    def set_external_addresses(self, addresses: Sequence[str]) -> None:
        """Advertise these too: what others reach this node at, without its peer id at the end."""
        self._libp2p.external_addresses = [Multiaddr(f"{address}/p2p/{self.peer_id}") for address in addresses]

    @property
    def observed_ips(self) -> list[str]:
        """As whom peers on the internet, or in this network, see this node, as far as they have been asked."""
        return self._observed_ips

    def set_observed_ips(self, ips: Sequence[str]) -> None:
        """What they said."""
        self._observed_ips = list(dict.fromkeys(ips))

    @property
    def own_ips(self) -> list[str]:
        """The IP addresses of this machine that this node listens at."""
        return list(dict.fromkeys(str(address).split("/")[2] for address in self._libp2p.own_addrs()))

    @property
    def listening(self) -> list[tuple[str, int]]:
        """The IP addresses and ports that this node listens on, as they were bound."""
        bound = (
            str(address).split("/") for listener in self._swarm.listeners.values() for address in listener.get_addrs()
        )
        return [(parts[2], int(parts[4])) for parts in bound]

    async def open_stream(self, peer: bytes, protocol: str, timeout: float = DIAL_TIMEOUT) -> Stream:
        """A new stream, connecting if need be; `PeerUnreachableError` if there is none in `timeout` seconds."""
        with _deadline(peer, timeout):
            await self.connect(peer)
            try:
                stream = await self._libp2p.new_stream(id_of(peer), [TProtocol(protocol)])
            except Exception as error:  # no exception of libp2p, which has dozens, leaves
                raise PeerUnreachableError(f"{peer_id_of(peer)} gives no stream of {protocol}: {error}") from error
            return Stream(cast("NetStream", stream), peer, protocol)

    # Connections

    @property
    def connected(self) -> frozenset[bytes]:
        """The peers with a live connection."""
        return frozenset(peer for peer_id in self._swarm.connections if self.is_connected(peer := peer_of(peer_id)))

    def is_connected(self, peer: bytes) -> bool:
        """Whether there is a live connection to a peer."""
        return bool(self._live_connections(peer))

    def path(self, peer: bytes) -> str:
        """How a peer's streams travel: "direct", "punched" (directly, through a hole), "relayed"; or "": not at all."""
        connections = self._live_connections(peer)
        if not connections:
            return ""
        direct = [connection for connection in connections if not is_relayed(connection)]
        if direct and all(cast("MendedConn", connection).is_punched for connection in direct):
            return "punched"
        return "direct" if direct else "relayed"

    def round_trip(self, peer: bytes) -> float | None:
        """Seconds to a peer and back, as last measured on the way that its streams take; None if not yet."""
        path = self.path(peer)
        measured = (
            cast("MendedConn", conn).muxed_conn.round_trip
            for conn in self._live_connections(peer)
            if is_relayed(conn) == (path == "relayed")
        )
        return min((seconds for seconds in measured if seconds is not None), default=None)

    def is_direct(self, peer: bytes) -> bool:
        """Whether a connection to a peer goes through no relay."""
        return self.path(peer) not in ("", "relayed")

    def remote_addresses(self, peer: bytes) -> list[str]:
        """The multiaddrs at the other end of the connections to a peer; a relayed one's has /p2p-circuit in it."""
        addresses = [address for conn in self._live_connections(peer) for address in conn.get_transport_addresses()]
        return list(dict.fromkeys(map(str, addresses)))

    def _live_connections(self, peer: bytes) -> list[INetConn]:
        return [conn for conn in self._swarm.get_connections(id_of(peer)) if not conn.is_closed]

    async def go_offline(self) -> None:
        """End all connections, and begin and accept none, until `go_online`."""
        self.is_offline = self._swarm.is_offline = True
        for peer in self.connected:
            await self.disconnect(peer)

    def go_online(self) -> None:
        """As before."""
        self.is_offline = self._swarm.is_offline = False

    async def disconnect(self, peer: bytes) -> None:
        """End every connection to a peer."""
        for connection in self._live_connections(peer):
            await connection.close()

    def protect(self, is_needed: Callable[[bytes], bool]) -> None:
        """Keep connections to peers for whom this says yes when there are too many.

        All others are strangers: these share what memory there is for data that nobody has read. Each call adds peers.
        """
        self._needs.append(is_needed)

    def _is_needed(self, peer_id: ID) -> bool:
        peer = peer_of(peer_id)
        return any(is_needed(peer) for is_needed in self._needs)

    @contextmanager
    def connection_events(self) -> Iterator[ConnectionEvents]:
        """Subscribe to connections coming and going, beginning with those that are there."""
        events = ConnectionEvents(self._told_connected)
        self._subscribers.add(events)
        try:
            yield events
        finally:
            self._subscribers.discard(events)

    def note_connection(self, peer: bytes) -> None:
        """A connection came or went: tell who waits, and the subscribers if it was the first or the last."""
        self._news.set()
        self._news = trio.Event()
        is_connected = self.is_connected(peer)
        if is_connected == (peer in self._told_connected):
            return
        if is_connected:
            self._told_connected.add(peer)
            self._dht.note_connection()
        else:
            self._told_connected.discard(peer)
        for events in self._subscribers:
            events.put(peer, is_connected)

    # Who provides what

    async def provide(self, key: bytes) -> None:
        """Announce that this node provides a 32-byte key, and keep it announced for as long as the host is open.

        Returns after the first announcement, whether or not there was anybody to hear it.
        """
        await self._dht.provide(key)

    def withdraw(self, key: bytes) -> None:
        """Provide a key no more: it is not announced again."""
        self._dht.withdraw(key)

    async def find_providers(self, key: bytes, timeout: float) -> list[tuple[bytes, list[str]]]:
        """Other peers that say they provide a key, with addresses, as found within `timeout` seconds.

        The addresses are remembered, so the peers can be connected to. What peers say may be false or out of date.
        """
        providers = await self._dht.find_providers(key, timeout)
        for peer, addresses in providers:
            self.add_addresses(peer, addresses)
        return providers

    # Dialling

    def add_addresses(self, peer: bytes, addresses: Iterable[str]) -> None:
        """Remember where a peer may be reached; what is no address is passed over, the oldest make room.

        Who dials it at this moment, perhaps at addresses where nobody answers, tries these too.
        """
        self._dialler.offer(peer, self._known.add(peer, addresses))

    def add_hearsay(self, peer: bytes, addresses: Iterable[str]) -> None:
        """Remember where a peer may be reached, as others say. It makes no room for itself among what is known."""
        self._hearsay.add(peer, addresses)

    def addresses_of(self, peer: bytes) -> list[str]:
        """The addresses known for a peer, the latest first."""
        known = [*self._known.of(peer), *self._hearsay.of(peer)]
        with suppress(Exception):
            known += [str(address) for address in self._libp2p.get_peerstore().addrs(id_of(peer))]
        return list(dict.fromkeys(known))[: 2 * MAX_ADDRESSES]

    async def connect(
        self, peer: bytes, addresses: Sequence[str] = (), timeout: float = DIAL_TIMEOUT, *, is_direct: bool = False
    ) -> None:
        """Return once there is a connection; `PeerUnreachableError` if there is none in `timeout` seconds.

        ``is_direct``: a connection through a relay is none.
        """
        if addresses:
            self.add_addresses(peer, addresses)

        def is_done() -> bool:
            return self.is_direct(peer) if is_direct else self.is_connected(peer)

        with _deadline(peer, timeout):
            while not is_done():
                error = await self._dialler.dial(peer, addresses, is_direct=is_direct)
                if error is not None and not is_done():
                    raise PeerUnreachableError(str(error))

    async def _dial_by_id(self, peer_id: ID) -> None:
        await self.connect(peer_of(peer_id))

    async def dial_one(self, peer: bytes, address: str) -> MuxedConn:
        """A connection to a peer at this address that nothing runs yet; raises whatever stands against it."""
        target = dial_target(address, peer)
        if target is not None:
            return await self.upgrade(Socket(await trio.open_tcp_stream(*target)), peer)
        circuit = await self.relays.open_circuit(peer, address)
        muxed = await self.upgrade(circuit, peer)
        self._circuits[muxed] = circuit
        return muxed

    async def upgrade(self, socket: Socket | Circuit, peer: bytes | None) -> MuxedConn:
        """Authenticate and multiplex; with a peer as the end that dialled it. Closes the socket if this fails."""
        try:
            with trio.fail_after(HANDSHAKE_TIMEOUT):
                return await self._swarm.upgrade(socket, id_of(peer) if peer is not None else None)
        except BaseException:  # cancelled, too: nobody else has the socket yet
            socket.abort()
            raise

    async def dial_from_listener(self, target: tuple[str, int], port: int | None = None) -> Socket:
        """A TCP connection from the port that listens, not authenticated yet; `OSError` if it comes to none.

        ``port``: from that one instead, over IPv4.
        """
        for local in self.listening if port is None else [("0.0.0.0", port)]:
            if (":" in local[0]) == (":" in target[0]):
                return Socket(await connect_from(local, target))
        raise OSError(f"nothing listens here that could dial {target[0]}")

    @asynccontextmanager
    async def open_aside(
        self, peer: bytes, timeout: float = DIAL_TIMEOUT, port: int | None = None
    ) -> AsyncIterator[Callable[[str], Awaitable[Stream]]]:
        """One more connection to a peer that was dialled, from the port that listens; gives what opens streams on it.

        ``port``: from that one instead, over IPv4. Nothing but other blocks like this uses it. Raises
        `PeerUnreachableError`.
        """
        async with self._asides.open((peer, port), timeout) as conn:

            async def open_stream(protocol: str) -> Stream:
                try:
                    stream = await self._libp2p.new_stream_on(conn, TProtocol(protocol))
                except Exception as error:  # as in `open_stream`: no exception of libp2p leaves
                    raise PeerUnreachableError(f"{peer_id_of(peer)} gives no stream of {protocol}: {error}") from error
                return Stream(stream, peer, protocol)

            yield open_stream

    async def _dial_aside(self, key: tuple[bytes, int | None]) -> MendedConn:
        peer, port = key
        with trio.fail_after(DIAL_TIMEOUT):
            socket = await self.dial_from_listener(self._dialled_target(peer), port)
            socket.leave_nothing()
            return MendedConn(await self.upgrade(socket, peer), self._swarm, "outbound")

    def is_dialled(self, peer: bytes) -> bool:
        """Whether it was we who made a direct connection to a peer."""
        with suppress(PeerUnreachableError):
            return bool(self._dialled_target(peer))
        return False

    def _dialled_target(self, peer: bytes) -> tuple[str, int]:
        """Where a connection that we dialled leads to."""
        for connection in self._live_connections(peer):
            if cast("MendedConn", connection).direction is Direction.OUTBOUND:
                for address in connection.get_transport_addresses():
                    if (target := dial_target(str(address), peer)) is not None:
                        return target
        raise PeerUnreachableError("we have no connection with it that we dialled directly")

    async def prove(self, peer: bytes, target: tuple[str, int]) -> None:
        """Dial a peer anew, and hang up as soon as it has proved who it is.

        Raises `StrangerError` if it is another, or else whatever stands against it.
        """
        socket = Socket(await trio.open_tcp_stream(*target))
        try:
            with trio.fail_after(HANDSHAKE_TIMEOUT):
                await self._swarm.authenticate(socket, id_of(peer))
        except PeerIDMismatchesPubkey as error:
            raise StrangerError(f"{peer_id_of(peer)} is not at {target[0]} port {target[1]}") from error
        finally:
            socket.abort()

    async def adopt(self, muxed: MuxedConn, direction: str, *, is_punched: bool = False) -> trio.Event:
        """Take a connection that came about otherwise than by `connect`; returns the event of its end."""
        conn = await self._swarm.add_conn(muxed, direction)
        conn.is_punched = is_punched
        return conn.finished

    # Punching

    async def meet(self, peer: bytes, target: tuple[str, int], *, is_initiator: bool) -> None:
        """Dial from the port that listens while the peer does the same; the initiator of the handshake is agreed on.

        Raises whatever stands against it.
        """
        muxed = await self.upgrade(await self.dial_from_listener(target), peer if is_initiator else None)
        if muxed.peer_id != id_of(peer):
            await muxed.secured_conn.close()
            raise PeerUnreachableError(f"{muxed.peer_id} is there, where {peer_id_of(peer)} should be")
        await self.adopt(muxed, "outbound" if is_initiator else "inbound", is_punched=True)

    @contextmanager
    def expecting(self, peer: bytes, ips: Iterable[str]) -> Iterator[None]:
        """We and a peer dial each other at once; we begin for who comes from these IP addresses and does not."""
        self._expected[peer] = frozenset(ips)
        try:
            yield
        finally:
            del self._expected[peer]

    def _expected_at(self, remote: tuple[str, int] | None) -> ID | None:
        if remote is None:
            return None
        return next((id_of(peer) for peer, ips in self._expected.items() if remote[0] in ips), None)

    def is_called_by(self, peer: bytes) -> bool:
        """Whether it was the peer who made the relayed connection that there is to it."""
        connections = [connection for connection in self._live_connections(peer) if is_relayed(connection)]
        return any(cast("MendedConn", connection).direction is Direction.INBOUND for connection in connections)

    async def wait_direct(self, peer: bytes) -> None:
        """Until there is a direct connection to a peer."""
        while not self.is_direct(peer):
            await self._news.wait()

    def retire_relayed(self, peer: bytes, after: float) -> None:
        """End the relayed connections to a peer that is connected directly.

        Those on which bulk is under way last until there has been a direct one for ``after`` seconds.
        """
        live = [cast("MendedConn", conn) for conn in self._live_connections(peer)]
        since = min((conn.opened_at for conn in live if not is_relayed(conn)), default=math.inf)
        for conn in live:
            if is_relayed(conn):
                _retire(conn, since + after)

    async def renew_worn(self, peer: bytes, after: float) -> None:
        """Have another take the place of a circuit that we dialled and that nears its limits.

        The old one ends as those of `retire_relayed` do. Raises whatever stands against another one.
        """
        relayed = [cast("MendedConn", conn) for conn in self._live_connections(peer) if is_relayed(conn)]
        newest_at = max((conn.opened_at for conn in relayed), default=math.inf)
        for conn in relayed:
            circuit = self._circuits.get(conn.muxed_conn)
            if circuit is None or not circuit.is_worn:
                continue
            if conn.opened_at < newest_at:
                _retire(conn, newest_at + after)
            else:
                await self._swarm.add_conn(await self.dial_one(peer, str(circuit.addresses[0])), "outbound")


def _retire(conn: MendedConn, at: float) -> None:
    """End a connection, at once or at that time if there is bulk under way."""
    streams = [cast("MuxedStream", each.muxed_stream) for each in conn.get_streams()]
    if trio.current_time() >= at or not any(stream.state.is_bulk for stream in streams):
        conn.event_closed.set()


@contextmanager
def _deadline(peer: bytes, timeout: float) -> Iterator[None]:
    try:
        with trio.fail_after(timeout):
            yield
    except trio.TooSlowError as error:
        raise PeerUnreachableError(f"{peer_id_of(peer)} did not answer in {timeout:g} s") from error


@asynccontextmanager
async def open_host(
    key: Ed25519PrivateKey,
    listen: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",),
    *,
    ping_interval: float = PING_INTERVAL,
    ping_timeout: float = PING_TIMEOUT,
    shaping: Shaping | None = None,
) -> AsyncIterator[Host]:
    """A host that listens on the multiaddrs (port 0: any free one) for as long as the block runs.

    What its connections move counts towards the caps of ``shaping``.
    Raises `ListenError` when an address is not of TCP or is taken. Leaving closes the listeners and all connections.
    """
    author = public_bytes(key)
    peer_id = id_of(author)
    peerstore = BoundedPeers(peer_id)
    peerstore.add_key_pair(peer_id, create_new_key_pair(key.private_bytes_raw()))
    upgrader = make_upgrader(key, shaping)
    async with open_service_nursery() as nursery:
        swarm = MendedSwarm(peer_id, peerstore, upgrader, nursery, ping_interval, ping_timeout)
        libp2p = MendedHost(swarm, addrs_factory=Announced())
        host = Host(author, libp2p, swarm, nursery)
        try:
            for address in listen:
                await _listen(swarm, address)
            yield host
        finally:
            with trio.CancelScope(deadline=trio.current_time() + 2 * CLOSE_TIMEOUT, shield=True):
                await libp2p.close()


async def _listen(swarm: MendedSwarm, address: str) -> None:
    match = re.fullmatch(r"/ip[46]/([^/]+)/tcp/(\d{1,5})", address)
    if match is None:
        raise ListenError(f"cannot listen on {address}: say /ip4/ADDRESS/tcp/PORT or /ip6/ADDRESS/tcp/PORT")
    try:
        await swarm.listen_at(match[1], int(match[2]))
    except (OSError, OverflowError) as error:
        raise ListenError(f"cannot listen on {address}: {error}") from error
