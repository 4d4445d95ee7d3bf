"""This node's place in the mesh: connections to peers, streams on them, and providers of keys.

Peers are public keys here, and no exception of libp2p leaves. TCP, Noise and yamux only: py-libp2p's QUIC loses data,
its mplex is slow, and TLS would only add a second way in. From py-libp2p farandole uses Noise and the protobuf
messages. Connections, streams, multistream, identify and Kademlia are its own, since the library's classes fail in
ways that no public option turns off (see the docstring of each module).
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.mesh.relay import parse_circuit
from farandole.protocol.run.releases import Software
from farandole.protocol.wire.identity import peer_id_of, public_bytes

from ..base.bandwidth import Shaping
from ..base.errors import ListenError, PeerUnreachableError, StrangerError
from ..base.nurseries import open_service_nursery
from ..base.system.sockets import NO_IPV6
from .addresses import multiaddr_of
from .cautious_dials import CautiousDials
from .connection import CLOSE_TIMEOUT
from .connection_events import ConnectionEvents
from .connections import Acceptor, ConnectionPool
from .dht import Dht
from .dial_plan import dial_target
from .dialler import DIAL_TIMEOUT, Dialler
from .gate import Gate
from .identify import IdentifyService
from .known_addresses import KnownAddresses
from .libp2p_stream import Libp2pStream
from .own_addresses import OwnAddresses
from .protocol_handlers import Handler, ProtocolHandlers
from .reach.probe_connections import ProbeConnections
from .relay_client import RelayClient
from .rendezvous import Rendezvous
from .reuse import connect_from
from .sockets import Socket
from .upgrading import Upgrader
from .yamux import MuxedConn

logger = logging.getLogger(__name__)

PING_INTERVAL = 10.0
PING_TIMEOUT = 10.0


class Host:
    """The libp2p host of this node; made by `open_host`."""

    def __init__(
        self,
        key: Ed25519PrivateKey,
        nursery: trio.Nursery,
        shaping: Shaping | None = None,
        ping_interval: float = PING_INTERVAL,
        ping_timeout: float = PING_TIMEOUT,
        network_key: bytes = b"",
    ) -> None:
        """``nursery``: runs the host's tasks; ``shaping``: counts the bytes that its connections move.

        ``network_key``: of a private run (`farandole.protocol.run.private_network`).
        """
        self.author = public_bytes(key)
        self.peer_id = peer_id_of(self.author)
        self.handlers = ProtocolHandlers()
        self.connections = ConnectionPool(nursery, self.handlers.serve, ping_interval, ping_timeout)
        self.upgrader = Upgrader(key, shaping, self.connections.budget, network_key)
        self.rendezvous = Rendezvous()
        self.acceptor = Acceptor(nursery, self.connections, self.upgrader, self.rendezvous)
        self.own = OwnAddresses(self.peer_id, lambda: self.acceptor.bound)
        self.ports: dict[str, int] = {}
        """The multiaddrs to listen on, without those of a family that this system lacks -> their ports."""
        self._known = KnownAddresses()
        self._hearsay = KnownAddresses()
        self._cautious = CautiousDials(self._ips_in_use)
        self._dialler = Dialler(self, nursery)
        self.probes = ProbeConnections(self, nursery)
        self._identify = IdentifyService(self)
        self.gate = self.connections.gate = Gate(self)
        self.handlers.admits = self.gate.admits
        self._dht = Dht(self)
        self.relays = RelayClient(self)
        nursery.start_soon(self._dht.run)
        nursery.start_soon(self._greet_newcomers, nursery)

    # Addresses of this node

    @property
    def addresses(self) -> list[str]:
        """Multiaddrs where this node can be dialled, each ending in /p2p/<peer id>."""
        return self.own.all

    @property
    def own_ips(self) -> list[str]:
        """The IP addresses of this machine that this node listens at."""
        return list(dict.fromkeys(ip for ip, _ in self.own.interfaces))

    @property
    def bound_ips(self) -> list[str]:
        """The IP addresses of the listening sockets, 0.0.0.0 and :: for all of this machine's."""
        return list(dict.fromkeys(ip for ip, _ in self.own.listening))

    @property
    def observed_ips(self) -> list[str]:
        """IP addresses of this node as peers see them."""
        return self.own.observed_ips

    @property
    def mapped(self) -> dict[int, tuple[str, int]]:
        """Ports of this machine -> the outer address that the router maps to them."""
        return self.own.mapped

    @property
    def bulk_ports(self) -> set[int]:
        """Other ports of this machine that peers dial."""
        return self.own.bulk_ports

    # Streams

    def set_handler(self, protocol: str, handler: Handler) -> None:
        """Serve a protocol, as `ProtocolHandlers.serve` does."""
        self.handlers.set(protocol, handler)

    @property
    def protocols(self) -> list[str]:
        """The protocols that this node serves."""
        return self.handlers.protocols

    def software_of(self, peer: bytes) -> Software | None:
        """Return what a connected peer runs, as it says; None if it has not said."""
        return self._identify.software.get(peer)

    async def identify(self, peer: bytes) -> None:
        """Ask a connected peer again what it runs. Raises nothing."""
        await self._identify.ask(peer)

    async def open_stream(
        self, peer: bytes, protocol: str, timeout: float = DIAL_TIMEOUT, *, may_dial: bool = True
    ) -> Libp2pStream:
        """Open a stream, connecting if needed; raise `PeerUnreachableError` if that takes over `timeout` seconds."""
        with _deadline(peer, timeout):
            if may_dial:
                await self.connect(peer)
            conn = self.connections.best(peer)
            try:
                return await conn.open_stream(protocol)
            except PeerUnreachableError:
                if not may_dial or not conn.muxed.event_closed.is_set():
                    raise
            await self.connect(peer)  # the connection has just ended: another may last
            return await self.connections.best(peer).open_stream(protocol)

    # Connections

    @property
    def connected(self) -> frozenset[bytes]:
        """The peers with a live connection."""
        return self.connections.connected

    def is_connected(self, peer: bytes) -> bool:
        """Return whether there is a live connection to a peer."""
        return bool(self.connections.of(peer))

    def path(self, peer: bytes) -> str:
        """Return how a peer's streams travel, as `ConnectionPool.path`."""
        return self.connections.path(peer)

    def is_direct(self, peer: bytes) -> bool:
        """Return whether there is a connection to a peer without a relay."""
        return self.path(peer) not in ("", "relayed")

    def remote_addresses(self, peer: bytes) -> list[str]:
        """Return the remote multiaddrs of the connections to a peer; a relayed one's has /p2p-circuit in it."""
        return list(dict.fromkeys(conn.link.address for conn in self.connections.of(peer)))

    def network(self, peer: bytes) -> str:
        """Return the remote network of the newest connection to a peer; empty if there is none, or it is unknown."""
        return next((conn.link.site.network for conn in reversed(self.connections.of(peer))), "")

    async def go_offline(self) -> None:
        """End all connections, and begin and accept none, until `go_online`."""
        self.connections.is_offline = True
        for peer in self.connected:
            await self.disconnect(peer)

    def go_online(self) -> None:
        """Return to normal after `go_offline`."""
        self.connections.is_offline = False

    async def disconnect(self, peer: bytes) -> None:
        """End every connection to a peer."""
        await self.connections.disconnect(peer)

    def shut_out(self, peer: bytes, seconds: float) -> None:
        """End every connection to a peer, and refuse new ones for ``seconds``, whichever side dials."""
        self.connections.shut_out(peer, seconds)

    def network_of(self, peer: bytes) -> str:
        """Return a connected peer's network, an IPv4 /24 or an IPv6 /48; empty if it is not known."""
        return self.connections.network_of(peer)

    def protect(self, is_needed: Callable[[bytes], bool]) -> None:
        """Keep connections to peers for which this is true when there are too many; see `ConnectionPool.protect`."""
        self.connections.protect(is_needed)

    def connection_events(self) -> AbstractContextManager[ConnectionEvents]:
        """Subscribe to connects and disconnects, starting with the peers that are connected."""
        return self.connections.events()

    async def _greet_newcomers(self, nursery: trio.Nursery) -> None:
        with self.connection_events() as events:
            async for peer, is_connected in events:
                if is_connected:
                    self._dht.note_connection()
                    nursery.start_soon(self._identify.ask, peer)
                else:
                    self._identify.software.pop(peer, None)

    # Providers

    async def provide(self, key: bytes) -> None:
        """Announce that this node provides a 32-byte key, and keep it announced for as long as the host is open.

        Returns after the first announcement, whether or not it reached a peer.
        """
        await self._dht.provide(key)

    def withdraw(self, key: bytes) -> None:
        """Stop announcing a key."""
        self._dht.withdraw(key)

    async def find_providers(self, key: bytes, timeout: float) -> list[tuple[bytes, list[str]]]:
        """Return other peers that claim to provide a key, with addresses, found within `timeout` seconds.

        The addresses are remembered, so the peers can be connected to. Claims of peers may be false or out of date.
        """
        providers = await self._dht.find_providers(key, timeout)
        for peer, addresses in providers:
            self.add_hearsay(peer, addresses)
        return providers

    # Dialling

    def add_addresses(self, peer: bytes, addresses: Iterable[str]) -> None:
        """Remember where a peer may be reached, from this node's user or from a successful connection.

        Invalid addresses are skipped; new ones replace the oldest. A dial of this peer that is running tries them too.
        """
        self._dialler.offer(peer, self._known.add(peer, addresses))

    def add_hearsay(self, peer: bytes, addresses: Iterable[str]) -> None:
        """Remember addresses of a peer from itself or from others; these are dialled with caution.

        They do not displace addresses from `add_addresses`.
        """
        self._dialler.offer(peer, self._hearsay.add(peer, addresses))

    def addresses_of(self, peer: bytes) -> list[str]:
        """Return the addresses known for a peer, the latest first."""
        known = (*self._known.of(peer), *self._hearsay.of(peer))
        return list(dict.fromkeys(known))

    def addresses_to_keep(self, peer: bytes) -> list[str]:
        """Return the addresses of `addresses_of` that may be dialled without caution another day."""
        known = self._known.of(peer)

        def is_harmless(address: str) -> bool:
            circuit = parse_circuit(address)
            target = (
                dial_target(address, peer) if circuit is None else dial_target(circuit.relay_address, circuit.relay)
            )
            return target is not None and self._cautious.allows(*target)

        return [address for address in self.addresses_of(peer) if address in known or is_harmless(address)]

    def _ips_in_use(self) -> Iterator[str]:
        """Yield the IP addresses that this node uses: the ones that it has dialled, and the ones that it listens on."""
        for conn in self.connections.live:
            if conn.is_outbound and conn.link.remote is not None and not conn.link.is_relayed:
                yield conn.link.remote[0]
        yield from (ip for ip, _ in self.acceptor.bound)

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
            (self.add_hearsay if is_hearsay else self.add_addresses)(peer, addresses)

        def is_done() -> bool:
            return self.is_direct(peer) if is_direct else self.is_connected(peer)

        if self.connections.is_shut_out(peer):
            raise PeerUnreachableError(f"{peer_id_of(peer)} is kept out for a while")
        with _deadline(peer, timeout):
            while not is_done():
                error = await self._dialler.dial(peer, addresses, is_direct=is_direct)
                if error is not None and not is_done():
                    raise PeerUnreachableError(str(error))

    async def dial_one(self, peer: bytes, address: str) -> MuxedConn:
        """Return a connection to a peer at this address that no task runs yet; raise any error of the dial."""
        target, is_known = dial_target(address, peer), address in self._known.of(peer)
        if target is None:
            return await self.upgrader.dial(
                await self.relays.open_circuit(peer, address, is_hearsay=not is_known), peer
            )
        if is_known:
            return await self.upgrader.dial(Socket(await trio.open_tcp_stream(*target)), peer)
        stream, reached = await self._cautious.open(target)
        try:
            muxed = await self.upgrader.dial(Socket(stream), peer)
        except StrangerError:  # the address is a node's all the same, so no third party is bothered
            self._cautious.succeed(*reached)
            raise
        self._cautious.succeed(*reached)
        return muxed

    async def prove(self, peer: bytes, target: tuple[str, int]) -> None:
        """Dial a peer once more, and hang up as soon as it has authenticated itself.

        Raises `StrangerError` if it is another peer; other errors of the dial pass through.
        """
        socket = Socket(await trio.open_tcp_stream(*target))
        try:
            await self.upgrader.authenticate(socket, peer)
        except StrangerError as error:
            raise StrangerError(f"{peer_id_of(peer)} is not at {target[0]} port {target[1]}") from error
        finally:
            socket.abort()

    async def renew_worn(self, peer: bytes, after: float) -> None:
        """Replace a circuit that this node dialled and that nears its limits.

        The old one ends under the conditions of `ConnectionPool.retire_relayed`. Errors of the new dial pass through.
        """
        worn = self.connections.worn_circuit(peer, after)
        if worn is not None:
            await self.connections.add(await self.dial_one(peer, worn.address), is_outbound=True)

    # Dials from the listening port

    async def dial_from_listener(self, target: tuple[str, int], port: int | None = None) -> Socket:
        """Return a TCP connection from the listening port, not authenticated yet; raise `OSError` if it fails.

        ``port``: dial from this port instead, over IPv4.
        """
        for local in self.own.listening if port is None else [("0.0.0.0", port)]:
            if (":" in local[0]) == (":" in target[0]):
                return Socket(await connect_from(local, target))
        raise OSError(f"nothing listens here that could dial {target[0]}")

    async def meet(self, peer: bytes, target: tuple[str, int], *, is_initiator: bool) -> None:
        """Dial from the listening port while the peer does the same; the initiator of the handshake is agreed on.

        Errors of the dial pass through.
        """
        socket = await self.dial_from_listener(target)
        muxed = await (self.upgrader.dial(socket, peer) if is_initiator else self.upgrader.accept(socket))
        if muxed.peer != peer:
            await muxed.link.close()
            raise PeerUnreachableError(f"{peer_id_of(muxed.peer)} is there, where {peer_id_of(peer)} should be")
        await self.connections.add(muxed, is_outbound=is_initiator, is_punched=True)

    async def wait_direct(self, peer: bytes) -> None:
        """Wait until there is a direct connection to a peer."""
        while not self.is_direct(peer):
            await self.connections.wait_for_change()

    def dialled_target(self, peer: bytes) -> tuple[str, int] | None:
        """Return the target of a direct connection that this node dialled; None if there is none."""
        targets = (dial_target(conn.link.address, peer) for conn in self.connections.of(peer) if conn.is_outbound)
        return next((target for target in targets if target is not None), None)

    def ipv4_target(self, peer: bytes) -> tuple[str, int] | None:
        """Return an IPv4 address of a peer that may be dialled now; None if none is known.

        `note_proof` follows if the peer is there.
        """
        for address in self.addresses_of(peer):
            target = dial_target(address, peer) if address.startswith("/ip4/") else None
            if target and (address in self._known.of(peer) or self._cautious.may_try(*target)):
                return target
        return None

    def note_proof(self, peer: bytes, target: tuple[str, int]) -> None:
        """Note that a peer has authenticated itself there: the address needs no caution any more."""
        self._cautious.succeed(*target)
        self.add_addresses(peer, [multiaddr_of(*target)])

    async def close(self) -> None:
        """Stop listening and end every connection."""
        self.acceptor.close()
        await self.connections.close()


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
    network_key: bytes = b"",
    first_ports: Mapping[str, int] | None = None,
    announce: Sequence[str] = (),
) -> AsyncIterator[Host]:
    """Open a host that listens on the multiaddrs (port 0: any free one) for as long as the block runs.

    Multiaddrs with port 0 get one port for both families, if it is free in both: a router's owner opens one. Without
    IPv6 on this system, /ip6/:: is left out.
    ``first_ports``: a multiaddr with port 0 -> the port to try before any other free one; ``announce``: multiaddrs
    without a peer id that lead here from elsewhere.
    The traffic of its connections counts towards the caps of ``shaping``. With ``network_key``, 32 bytes, it connects
    only to hosts with the same key.
    Raises `ListenError` if an address is not TCP or is taken. Leaving closes the listeners and all connections.
    """
    async with open_service_nursery() as nursery:
        host = Host(key, nursery, shaping, ping_interval, ping_timeout, network_key)
        try:
            host.own.announced = announce
            for address in listen:
                kept = (first_ports or {}).get(address)
                await _listen(host, address, [kept] if kept else list(host.ports.values()))
            if listen and not host.ports:
                raise ListenError(f"cannot listen on {' or '.join(listen)}: this system has no IPv6")
            yield host
        finally:
            with trio.CancelScope(deadline=trio.current_time() + 2 * CLOSE_TIMEOUT, shield=True):
                await host.close()


async def _listen(host: Host, address: str, first_ports: Iterable[int]) -> None:
    match = re.fullmatch(r"/ip[46]/([^/]+)/tcp/(\d{1,5})", address)
    if match is None:
        raise ListenError(f"cannot listen on {address}: say /ip4/ADDRESS/tcp/PORT or /ip6/ADDRESS/tcp/PORT")
    ip, port = match[1], int(match[2])
    if port == 0:
        for first in first_ports:
            with contextlib.suppress(OSError):
                host.ports[address] = await host.acceptor.listen(ip, first)
                return
    try:
        host.ports[address] = await host.acceptor.listen(ip, port)
    except (OSError, OverflowError) as error:
        if ip != "::" or getattr(error, "errno", None) not in NO_IPV6:
            raise ListenError(f"cannot listen on {address}: {error}") from error
        logger.info("not listening on %s: %s", address, error)
