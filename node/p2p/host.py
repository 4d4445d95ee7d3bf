"""This node's place in the mesh: connections to peers, streams on them, and who provides what.

Peers are public keys here, and no exception of libp2p leaves (who else imports it, says ARCHITECTURE.md). TCP, Noise
and yamux only: py-libp2p's QUIC loses data, its mplex is slow, and TLS would only add a second way in.

Dialling is our own ("happy eyeballs", RFC 8305): every address of a peer is tried, each 150 ms after the one before or
at once when that one failed, and the first that is authenticated and multiplexed wins.
"""

from __future__ import annotations

import logging
import math
import random
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.abc import INetConn, INetStream, INetwork, INotifee
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_new_x25519_key_pair
from libp2p.custom_types import TProtocol
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.net_stream import NetStream
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.rcmgr import Direction
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
from libp2p.security.noise.transport import Transport as NoiseTransport
from multiaddr import Multiaddr

from farandole.protocol.errors import RemoteProtocolError
from farandole.protocol.identity import peer_id_of, public_bytes

from ..errors import ListenError, PeerUnreachableError, StrangerError
from ..nurseries import open_service_nursery
from ..reach.aside import Asides
from ..shaping import Shaping
from .announced import Announced
from .circuit import Circuit
from .connection_events import ConnectionEvents
from .dht import Dht
from .dialling import DIRECT_HEAD_START, MAX_ADDRESSES_PER_PEER, Dial, dial_target, is_multiaddr
from .libp2p_names import id_of, peer_of
from .libp2p_stream import Stream
from .mends.connection import CLOSE_TIMEOUT, MendedConn
from .mends.host import MendedHost
from .mends.sockets import Socket
from .mends.swarm import HANDSHAKE_TIMEOUT, MendedSwarm
from .mends.upgrading import MendedUpgrader
from .relay_client import RelayClient
from .reuse import connect_from
from .yamux import YamuxConn
from .yamux_stream import YamuxStream

if TYPE_CHECKING:
    from collections.abc import Iterable

logger = logging.getLogger(__name__)

DIAL_TIMEOUT = 8.0
# Between two addresses of one peer: RFC 8305 recommends 250 ms and allows 100.
DIAL_STAGGER = 0.15
# Before further attempts at an address whose node hangs up before it has authenticated itself, in seconds, each half to
# one and a half of it.
REDIAL_PAUSES = (0.1, 0.2, 0.4, 0.4)
PING_INTERVAL = 10.0
PING_TIMEOUT = 10.0
# Of the address book.
MAX_BOOK_PEERS = 4096
MAX_ADDRESS_CHARS = 512


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
        self._nursery = nursery
        self._book: OrderedDict[bytes, dict[str, None]] = OrderedDict()
        self._dials: dict[tuple[bytes, bool], Dial] = {}
        self._subscribers: set[ConnectionEvents] = set()
        self._told_connected: set[bytes] = set()
        self._observed_ips: list[str] = []
        self._circuits: WeakKeyDictionary[YamuxConn, Circuit] = WeakKeyDictionary()  # that we dialled
        self._asides = Asides(self._dial_aside, nursery)
        self._news = trio.Event()  # a connection has come or gone
        self.bulk_ports: set[int] = set()
        """Other ports of this machine that peers dial (farandole.node.exchanges.bulk)."""
        self.mapped: dict[int, tuple[str, int]] = {}
        """Ports of this machine -> where its router sends on to them, as the router says (farandole.node.mapping)."""
        self.observe_port: Callable[[int], AbstractAsyncContextManager[list[tuple[str, int]]]] = lambda port: (
            nullcontext([])
        )
        """As whom others see a port of this machine that is in use, where its router changes ports; else nothing."""
        self._is_offline = False
        self._needs: list[Callable[[bytes], bool]] = []
        self.is_out_of_reach: Callable[[bytes], bool] = lambda peer: False
        """Whether `farandole.node.reach.punching` has shown that no direct connection to a peer comes about."""
        swarm.commons.is_needed = self._is_needed
        self._dht = Dht(libp2p)
        nursery.start_soon(self._dht.run)
        swarm.dial = self._dial_by_id
        swarm.expected = self._expected_at
        swarm.is_met = lambda peer_id: peer_of(peer_id) in self._expected
        self._expected: dict[bytes, frozenset[str]] = {}
        swarm.register_notifee(_ConnectionNotifee(self))
        self.relays = RelayClient(self)

    @property
    def addresses(self) -> list[str]:
        """Where this node can be dialled: multiaddrs, each ending in /p2p/<peer id>."""
        return [str(address) for address in self._libp2p.get_addrs()]

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
        self._is_offline = self._swarm.is_offline = True
        for peer in self.connected:
            await self.disconnect(peer)

    def go_online(self) -> None:
        """As before."""
        self._is_offline = self._swarm.is_offline = False

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
        known = self._book.setdefault(peer, {})
        self._book.move_to_end(peer)
        good = [address for address in addresses if len(address) <= MAX_ADDRESS_CHARS and is_multiaddr(address)]
        for address in good:
            known.pop(address, None)
            known[address] = None
        for (dialled, _), dial in self._dials.items():
            if dialled == peer:
                dial.offer(good)
        while len(known) > MAX_ADDRESSES_PER_PEER:
            del known[next(iter(known))]
        while len(self._book) > MAX_BOOK_PEERS:
            self._book.popitem(last=False)

    def addresses_of(self, peer: bytes) -> list[str]:
        """The addresses known for a peer, the latest first."""
        known = list(reversed(self._book.get(peer, {})))
        with suppress(Exception):
            known += [str(address) for address in self._libp2p.get_peerstore().addrs(id_of(peer))]
        return list(dict.fromkeys(known))[: 2 * MAX_ADDRESSES_PER_PEER]

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
                dial = self._dials.get((peer, is_direct))
                if dial is None:
                    dial = self._dials[peer, is_direct] = Dial(is_direct, self._own_targets())
                    self._nursery.start_soon(self._run_dial, peer, dial)
                dial.offer(addresses)
                await dial.done.wait()
                if dial.error is not None and not is_done():
                    raise PeerUnreachableError(str(dial.error))

    def _own_targets(self) -> list[tuple[str, int]]:
        ports = {":" in ip: port for ip, port in self.listening}
        return [(ip, ports[":" in ip]) for ip in self.own_ips if (":" in ip) in ports]

    async def _dial_by_id(self, peer_id: ID) -> None:
        await self.connect(peer_of(peer_id))

    async def _run_dial(self, peer: bytes, dial: Dial) -> None:
        is_adopted = False
        try:
            if peer == self.author:
                raise PeerUnreachableError("this is myself")
            if self._is_offline:
                raise PeerUnreachableError("this node is offline for now")
            dial.offer(self.addresses_of(peer))
            with trio.move_on_after(DIAL_TIMEOUT):
                await self._race(peer, dial)
            if dial.winner is None:
                reasons = "; ".join(dial.failures) or "no address of it is known, or none answered"
                raise PeerUnreachableError(f"cannot reach {peer_id_of(peer)}: {reasons}")
            address, muxed = dial.winner
            self.add_addresses(peer, [address])
            is_adopted = True
            await self._swarm.add_conn(muxed, "outbound")
        except PeerUnreachableError as error:
            dial.error = error
        except Exception as error:  # likewise
            dial.error = PeerUnreachableError(f"cannot reach {peer_id_of(peer)}: {error!r}")
        finally:
            if dial.winner is not None and not is_adopted:  # cancelled as soon as it was there
                await _discard(dial.winner[1])
            del self._dials[peer, dial.is_direct]
            dial.done.set()

    async def _race(self, peer: bytes, dial: Dial) -> None:
        async def attempt(address: str) -> None:
            try:
                muxed = await self._dial_patiently(peer, address)
            except Exception as error:  # whatever the handshakes raise, another address may do
                dial.failures.append(f"{address}: {str(error) or repr(error)}")
                dial.news.set()
            else:
                if dial.winner is None:
                    dial.winner = (address, muxed)
                    nursery.cancel_scope.cancel()
                else:
                    await _discard(muxed)

        async with trio.open_nursery() as nursery:
            while True:
                dial.news = trio.Event()
                is_trying = bool(nursery.child_tasks)
                address = dial.next_address(peer, is_trying=is_trying)
                if address is not None:
                    nursery.start_soon(attempt, address)
                    with trio.move_on_after(DIAL_STAGGER):
                        await dial.news.wait()
                elif is_trying:
                    with trio.move_on_after(DIRECT_HEAD_START):
                        await dial.news.wait()
                else:
                    return

    async def _dial_patiently(self, peer: bytes, address: str) -> YamuxConn:
        """Dial again where the other end hangs up at once: it refuses some while too many dial it."""
        for pause in REDIAL_PAUSES:
            try:
                return await self._dial_one(peer, address)
            except (OSError, SwarmException, PeerUnreachableError, trio.TooSlowError):
                raise
            except Exception as error:  # the handshakes raise whatever comes when the other end is gone
                logger.debug("%s hung up: %r", address, error)
                await trio.sleep(pause * random.uniform(0.5, 1.5))
        return await self._dial_one(peer, address)

    async def _dial_one(self, peer: bytes, address: str) -> YamuxConn:
        target = dial_target(address, peer)
        if target is not None:
            return await self.upgrade(Socket(await trio.open_tcp_stream(*target)), peer)
        circuit = await self.relays.open_circuit(peer, address)
        muxed = await self.upgrade(circuit, peer)
        self._circuits[muxed] = circuit
        return muxed

    async def upgrade(self, socket: Socket | Circuit, peer: bytes | None) -> YamuxConn:
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

    async def adopt(self, muxed: YamuxConn, direction: str, *, is_punched: bool = False) -> trio.Event:
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
                await self._swarm.add_conn(await self._dial_one(peer, str(circuit.addresses[0])), "outbound")


def _retire(conn: MendedConn, at: float) -> None:
    """End a connection, at once or at that time if there is bulk under way."""
    streams = [cast("YamuxStream", each.muxed_stream) for each in conn.get_streams()]
    if trio.current_time() >= at or not any(stream.is_bulk for stream in streams):
        conn.event_closed.set()


class _ConnectionNotifee(INotifee):
    """Turns the library's notices of connections into `ConnectionEvents`."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        self._host.note_connection(peer_of(conn.muxed_conn.peer_id))

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        self._host.note_connection(peer_of(conn.muxed_conn.peer_id))

    async def opened_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def closed_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def listen(self, network: INetwork, multiaddr: Multiaddr) -> None: ...

    async def listen_close(self, network: INetwork, multiaddr: Multiaddr) -> None: ...


@contextmanager
def _deadline(peer: bytes, timeout: float) -> Iterator[None]:
    try:
        with trio.fail_after(timeout):
            yield
    except trio.TooSlowError as error:
        raise PeerUnreachableError(f"{peer_id_of(peer)} did not answer in {timeout:g} s") from error


def make_upgrader(key: Ed25519PrivateKey, shaping: Shaping | None = None) -> MendedUpgrader:
    """What authenticates connections by this key, and multiplexes them."""
    key_pair = create_new_key_pair(key.private_bytes_raw())
    noise = NoiseTransport(key_pair, noise_privkey=create_new_x25519_key_pair().private_key)
    return MendedUpgrader(noise, shaping)


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
    peerstore = PeerStore()
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


async def _discard(muxed: YamuxConn) -> None:
    """Close a connection that nothing runs yet, cancelled or not: nobody else has its socket."""
    with trio.CancelScope(deadline=trio.current_time() + CLOSE_TIMEOUT, shield=True):
        await muxed.secured_conn.close()
