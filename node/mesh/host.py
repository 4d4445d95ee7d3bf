"""This node's place in the mesh: connections to peers, streams on them, and providers of keys.

Peers are public keys here, and no exception of libp2p leaves. TCP, Noise and yamux only: py-libp2p's QUIC loses data,
its mplex is slow, and TLS would only add a second way in. From py-libp2p farandole uses Noise and the protobuf
messages. Connections, streams, multistream, identify and Kademlia are its own, since the library's classes fail in
ways that no public option turns off (see the docstring of each module).

A part imports the parts below it, and none imports this module: links, yamux, multistream, connections, gate, dialler;
then identify, the DHT and the client of relays, which use the dialler.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.run.releases import Software
from farandole.protocol.wire.identity import peer_id_of, public_bytes

from ..base.bandwidth import Shaping
from ..base.errors import ListenError
from ..base.nurseries import open_service_nursery
from ..base.streams import DIAL_TIMEOUT
from ..base.system.sockets import NO_IPV6
from .acceptor import Acceptor
from .addresses import OwnAddresses
from .connections import CLOSE_TIMEOUT, ConnectionPool
from .dht import Dht
from .dialler import Dialler
from .gate import Gate
from .identify import IdentifyService
from .multistream import Handler, ProtocolHandlers
from .relay_client import RelayClient
from .upgrading import Upgrader
from .yamux import Libp2pStream

logger = logging.getLogger(__name__)

PING_INTERVAL = 10.0
PING_TIMEOUT = 10.0


class Host:
    """The libp2p host of this node, made by `open_host`: its parts, and what services ask of any host."""

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

        ``network_key``: of a private run (`farandole.protocol.run.invite`).
        """
        self.author = public_bytes(key)
        self.peer_id = peer_id_of(self.author)
        self.nursery = nursery
        self.handlers = ProtocolHandlers()
        self.connections = ConnectionPool(nursery, self.handlers, ping_interval, ping_timeout)
        self.upgrader = Upgrader(key, shaping, self.connections.budget, network_key)
        self.own = OwnAddresses(self.peer_id)
        self.acceptor = Acceptor(nursery, self.connections, self.upgrader, self.own)
        self.ports: dict[str, int] = {}
        """The multiaddrs to listen on, without those of a family that this system lacks -> their ports."""
        self.gate = Gate(self.author, self.handlers, self.connections)
        self.dialler = Dialler(self.author, nursery, self.connections, self.upgrader, self.own, self.gate)
        self.dht = Dht(self.dialler, self.handlers)
        self.relays = RelayClient(self.dialler, self.handlers)
        self._identify = IdentifyService(self.dialler, self.handlers)
        nursery.start_soon(self.dht.run)
        nursery.start_soon(self._greet_newcomers)

    async def _greet_newcomers(self) -> None:
        with self.connections.events() as events:
            async for peer, is_connected in events:
                if is_connected:
                    self.dht.note_connection()
                    self.nursery.start_soon(self._identify.ask, peer)
                else:
                    self._identify.software.pop(peer, None)

    # What services ask of a host, so that they run on one in memory too (`farandole.node.base.streams.StreamHost`)

    @property
    def addresses(self) -> list[str]:
        """Multiaddrs where this node can be dialled, each ending in /p2p/<peer id>."""
        return self.own.all

    @property
    def connected(self) -> frozenset[bytes]:
        """The peers with a live connection."""
        return self.connections.connected

    @property
    def protocols(self) -> list[str]:
        """The protocols that this node serves."""
        return self.handlers.protocols

    def set_handler(self, protocol: str, handler: Handler) -> None:
        """Serve a protocol, as `ProtocolHandlers.serve` does."""
        self.handlers.set(protocol, handler)

    async def open_stream(self, peer: bytes, protocol: str, timeout: float = DIAL_TIMEOUT) -> Libp2pStream:
        """Open a stream, connecting if needed; raise `PeerUnreachableError` if that takes over `timeout` seconds."""
        return await self.dialler.open_stream(peer, protocol, timeout)

    async def connect(self, peer: bytes, addresses: Sequence[str] = (), timeout: float = DIAL_TIMEOUT) -> None:
        """Return once there is a connection; `PeerUnreachableError` if there is none in `timeout` seconds."""
        await self.dialler.connect(peer, addresses, timeout)

    def add_hearsay(self, peer: bytes, addresses: Iterable[str]) -> None:
        """Remember addresses of a peer from itself or from others; these are dialled with caution."""
        self.dialler.add_hearsay(peer, addresses)

    def software_of(self, peer: bytes) -> Software | None:
        """Return what a connected peer runs, as it says; None if it has not said."""
        return self._identify.software.get(peer)

    async def identify(self, peer: bytes) -> None:
        """Ask a connected peer again what it runs. Raises nothing."""
        await self._identify.ask(peer)

    def network_of(self, peer: bytes) -> str:
        """Return a connected peer's network, an IPv4 /24 or an IPv6 /48; empty if it is not known."""
        return self.connections.network_of(peer)

    def remote_addresses(self, peer: bytes) -> list[str]:
        """Return the remote multiaddrs of the connections to a peer; a relayed one's has /p2p-circuit in it."""
        return self.connections.remote_addresses(peer)

    def shut_out(self, peer: bytes, seconds: float) -> None:
        """End every connection to a peer, and refuse new ones for ``seconds``, whichever side dials."""
        self.connections.shut_out(peer, seconds)

    async def close(self) -> None:
        """Stop listening and end every connection."""
        self.acceptor.close()
        await self.connections.close()


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
