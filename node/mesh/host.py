"""This node's place in the mesh: connections to peers, streams on them, and providers of keys.

Peers are public keys here, and no exception of libp2p leaves. TCP, Noise and yamux only: py-libp2p's QUIC loses data,
its mplex is slow, and TLS would only add a second way in. From py-libp2p farandole uses Noise and the protobuf
messages. Connections, streams, multistream, identify and Kademlia are its own, since the library's classes fail in
ways that no public option turns off (see the docstring of each module).

A part imports the parts below it, and none imports this module: links, yamux, connections, gate, dialler; then
identify and the DHT, which use the dialler.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.run.releases import Software, software_of
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.identity import peer_id_of, public_bytes

from ..base.bandwidth import Shaping
from ..base.errors import ListenError, PeerUnreachableError
from ..base.nurseries import open_service_nursery
from ..base.project import VERSION
from ..base.system.sockets import NO_IPV6
from .addresses import OwnAddresses
from .connections import IDENTIFY_PROTOCOL, ConnectionPool, ProtocolHandlers
from .dht import Dht
from .dialler import Dialler, RelayClient
from .gate import Gate
from .libp2p_parts import Identify, encode_delimited, multiaddr_bytes, multiaddr_texts, receive_message
from .links import Site, Socket, listen_at, site_of
from .yamux import CLOSE_TIMEOUT, Libp2pStream, Upgrader

logger = logging.getLogger(__name__)

# Connections accepted in one pass of the event loop; refusing one costs 0.1 ms.
MAX_ACCEPTS_PER_PASS = 16
# Unfinished inbound handshakes by address and in all. Behind one address may sit many honest peers (carrier NAT, a
# laboratory), but few dial in the same second. A task, a socket and 600 bytes each.
MAX_HANDSHAKES_PER_ADDRESS: Final = 64
MAX_HANDSHAKES: Final = 256
# After an accept that failed because descriptors ran out.
ACCEPT_PAUSE = 0.5
AGENT_VERSION: Final = f"farandole/{VERSION}"
# As many bytes of identify as go-libp2p takes.
MAX_IDENTIFY_BYTES: Final = 8 * 1024
IDENTIFY_TIMEOUT: Final = 10.0


class IdentifyService:
    """Reports who this node is, and asks peers what they run and where they can be dialled.

    See github.com/libp2p/specs, identify: the first question of libp2p nodes.
    """

    def __init__(self, dialler: Dialler, handlers: ProtocolHandlers) -> None:
        self._dialler = dialler
        self._handlers = handlers
        self.software: dict[bytes, Software] = {}
        """What each connected peer runs, as it has said."""
        handlers.set(IDENTIFY_PROTOCOL, self._serve, MAX_IDENTIFY_BYTES)

    async def ask(self, peer: bytes) -> None:
        """Ask a connected peer what it runs and where it can be dialled, and remember that. Raises nothing."""
        try:
            with trio.fail_after(IDENTIFY_TIMEOUT):
                opened = self._dialler.open_stream(peer, IDENTIFY_PROTOCOL, IDENTIFY_TIMEOUT, may_dial=False)
                async with await opened as stream:
                    message = await receive_message(stream, Identify, MAX_IDENTIFY_BYTES)
        except (PeerUnreachableError, RemoteProtocolError, trio.BrokenResourceError, trio.TooSlowError) as error:
            logger.debug("a peer does not identify itself: %r", error)
            return
        if self._dialler.connections.of(peer):
            self.software[peer] = software_of(message.agent_version, message.protocols)
        self._dialler.add_addresses(peer, multiaddr_texts(message.listen_addrs), is_hearsay=True)

    async def _serve(self, stream: Libp2pStream) -> None:
        own = (address.rpartition("/p2p/")[0] for address in self._dialler.own.all)
        protocols = self._handlers.protocols
        message = Identify(agent_version=AGENT_VERSION, listen_addrs=multiaddr_bytes(own), protocols=protocols)
        with trio.fail_after(IDENTIFY_TIMEOUT):
            await stream.send_all(encode_delimited(message))


class Acceptor:
    """The listening sockets of one host, and the handshakes of what comes in by them.

    That is strangers, and peers that this node dials at the same time. The number of unfinished handshakes is bounded.
    At the bound, the handshake that has kept us waiting for longest is dropped: at the address, and in the network,
    that has most. Refusing newcomers instead would let an attacker with enough silent sockets keep all others out. If
    no handshake keeps us waiting, this node is the slow side. Then the newcomer is refused, since making room would
    only prevent every handshake from finishing.
    """

    def __init__(self, nursery: trio.Nursery, pool: ConnectionPool, upgrader: Upgrader, own: OwnAddresses) -> None:
        """``own``: gets the addresses of the listening sockets."""
        self.handshakes: set[Socket] = set()
        """Those that have not finished."""
        self.ports: dict[str, int] = {}
        """The multiaddrs to listen on, without those of a family that this system lacks -> their ports."""
        self._nursery = nursery
        self._pool = pool
        self._upgrader = upgrader
        self._own = own
        self._expected: dict[bytes, frozenset[str]] = {}
        self._listening: list[tuple[socket.socket, trio.CancelScope]] = []

    @contextlib.contextmanager
    def expecting(self, peer: bytes, ips: Iterable[str]) -> Iterator[None]:
        """Expect a simultaneous dial of a peer; begin the handshake for it if it comes from these IPs and waits."""
        self._expected[peer] = frozenset(ips)
        try:
            yield
        finally:
            del self._expected[peer]

    def listen(self, address: str, first_ports: Iterable[int]) -> None:
        """Accept connections at a multiaddr; where it has port 0, try these ports before any free one.

        Raises `ListenError`, but not for /ip6/:: on a system without IPv6.
        """
        match = re.fullmatch(r"/ip[46]/([^/]+)/tcp/(\d{1,5})", address)
        if match is None:
            raise ListenError(f"cannot listen on {address}: say /ip4/ADDRESS/tcp/PORT or /ip6/ADDRESS/tcp/PORT")
        ip, port = match[1], int(match[2])
        failure: Exception | None = None
        for each in (port,) if port else (*first_ports, 0):
            try:
                listening = listen_at(ip, each)
            except (OSError, OverflowError) as error:
                failure = error
                continue
            own, self.ports[address] = listening.getsockname()[:2]
            self._own.listening.append((own, self.ports[address]))
            self._listening.append((listening, trio.CancelScope()))
            self._nursery.start_soon(self._serve, *self._listening[-1])
            return
        if ip != "::" or getattr(failure, "errno", None) not in NO_IPV6:
            remedy = "choose another address or port (--port), or end the program that listens there"
            raise ListenError(f"cannot listen on {address}: {failure}; {remedy}") from failure
        logger.info("not listening on %s: %s", address, failure)

    def close(self) -> None:
        """Stop listening."""
        self._own.listening.clear()
        while self._listening:
            listening, serving = self._listening.pop()
            serving.cancel()
            trio.lowlevel.notify_closing(listening.fileno())
            listening.close()

    async def _serve(self, listening: socket.socket, serving: trio.CancelScope) -> None:
        """Begin the handshake of each inbound connection, or refuse it, until `close`."""
        with serving:
            while True:
                await trio.lowlevel.checkpoint()  # after `close` there is nothing to wait for
                await trio.lowlevel.wait_readable(listening.fileno())
                try:
                    for _ in range(MAX_ACCEPTS_PER_PASS):
                        connection, (host, *_) = listening.accept()
                        if self._pool.is_offline or not make_room(self.handshakes, site_of(host)):
                            connection.close()
                            continue
                        stream = trio.SocketStream(trio.socket.from_stdlib_socket(connection))
                        pending = Socket(stream, self._pool.turns)
                        self.handshakes.add(pending)
                        self._nursery.start_soon(self._accept, pending)
                except BlockingIOError:
                    pass
                except OSError as error:  # out of descriptors, or the peer is gone again
                    logger.debug("cannot accept a connection: %s", error)
                    await trio.sleep(ACCEPT_PAUSE)

    async def _accept(self, pending: Socket) -> None:
        ip = pending.remote[0] if pending.remote else ""
        # For a peer that meets us from there we act as the end that dialled.
        expected = next((peer for peer, ips in self._expected.items() if ip in ips), None)
        try:
            try:
                muxed = await self._upgrader.upgrade(pending, expected, is_initiator=False)
            finally:
                self.handshakes.discard(pending)
            conn = await self._pool.add(muxed, is_outbound=False, is_punched=muxed.peer in self._expected)
            await conn.finished.wait()
        except Exception as error:  # handshakes raise whatever strangers' bytes lead to
            logger.debug("inbound connection failed: %r", error)
        finally:
            pending.abort()


def make_room(handshakes: set[Socket], site: Site) -> bool:
    """Return whether a newcomer from this site may begin a handshake; may drop another one for it."""
    crowd, is_neighbour = [each for each in handshakes if each.site.address == site.address], True
    if len(crowd) < MAX_HANDSHAKES_PER_ADDRESS:
        if len(handshakes) < MAX_HANDSHAKES:
            return True
        networks = Counter(each.site.network for each in handshakes)
        busiest = max(networks, key=lambda network: (networks[network], network == site.network))
        crowd = [each for each in handshakes if each.site.network == busiest]
        address, _ = Counter(each.site.address for each in crowd).most_common(1)[0]
        crowd, is_neighbour = [each for each in crowd if each.site.address == address], busiest == site.network
    slowest = min(crowd, key=lambda each: each.waiting_since)
    if slowest.waiting_since == math.inf and is_neighbour:
        return False
    handshakes.discard(slowest)
    slowest.abort()
    return True


class Host:
    """The libp2p host of this node, made by `open_host`: its parts, and what services ask of any host."""

    def __init__(
        self,
        key: Ed25519PrivateKey,
        nursery: trio.Nursery,
        shaping: Shaping | None = None,
        network_key: bytes = b"",
    ) -> None:
        """``nursery``: runs the host's tasks; ``shaping``: counts the bytes that its connections move.

        ``network_key``: of a private run (`farandole.protocol.run.invite`).
        """
        self.author = public_bytes(key)
        self.peer_id = peer_id_of(self.author)
        self.nursery = nursery
        self.handlers = ProtocolHandlers()
        self.connections = ConnectionPool(nursery, self.handlers)
        self.upgrader = Upgrader(key, shaping, self.connections.budget, network_key)
        self.own = OwnAddresses(self.peer_id)
        self.acceptor = Acceptor(nursery, self.connections, self.upgrader, self.own)
        self.gate = Gate(key, self.handlers, self.connections)
        self.dialler = Dialler(self.author, nursery, self.connections, self.upgrader, self.own, self.gate)
        self.dht = Dht(self.dialler, self.handlers)
        self.relays = RelayClient(self.dialler, self.handlers)
        self.identify = IdentifyService(self.dialler, self.handlers)
        # What services ask of a host, so that they run on one in memory too (`farandole.node.base.streams.StreamHost`).
        self.set_handler, self.open_stream, self.connect = (
            self.handlers.set,
            self.dialler.open_stream,
            self.dialler.connect,
        )
        nursery.start_soon(self.dht.run)
        nursery.start_soon(self._greet_newcomers)

    async def _greet_newcomers(self) -> None:
        async for peer, is_connected in self.connections.events():
            if is_connected:
                self.dht.news.set()
                self.nursery.start_soon(self.identify.ask, peer)
            else:
                self.identify.software.pop(peer, None)

    @property
    def addresses(self) -> list[str]:
        """Multiaddrs where this node can be dialled, each ending in /p2p/<peer id>."""
        return self.own.all

    @property
    def connected(self) -> frozenset[bytes]:
        """The peers with a live connection."""
        return self.connections.connected

    async def close(self) -> None:
        """Stop listening and end every connection."""
        self.acceptor.close()
        await self.connections.close()


@contextlib.asynccontextmanager
async def open_host(
    key: Ed25519PrivateKey,
    listen: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",),
    *,
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
        host = Host(key, nursery, shaping, network_key)
        try:
            host.own.announced = announce
            for address in listen:
                kept = (first_ports or {}).get(address)
                host.acceptor.listen(address, [kept] if kept else list(host.acceptor.ports.values()))
            if listen and not host.acceptor.ports:
                raise ListenError(f"cannot listen on {' or '.join(listen)}: this system has no IPv6")
            yield host
        finally:
            with trio.CancelScope(deadline=trio.current_time() + 2 * CLOSE_TIMEOUT, shield=True):
                await host.close()
