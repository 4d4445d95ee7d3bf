"""All connections: who is let in, who makes room, how one is dialled."""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import cast

import trio
from libp2p.abc import IMuxedConn, INetConn, IPeerStore, ISecureConn
from libp2p.connection_types import ConnectionType
from libp2p.network.config import ConnectionConfig
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID

from ...base.system.sockets import listen_alone, share_port
from ..admission import Handshakes, Turns, site_of
from ..circuit import Circuit
from ..yamux import MuxedConn
from .connection import MendedConn
from .sockets import Listener, Socket
from .upgrading import MendedUpgrader

logger = logging.getLogger(__name__)

# From accepting a socket to an authenticated, multiplexed connection. Five round trips at 400 ms fit twice.
HANDSHAKE_TIMEOUT = 5.0
# Connections in all: a node keeps a dozen and dials partners beside them. With unfinished handshakes and bulk channels
# they fit into the 1,024 descriptors that a process has by default.
MAX_CONNECTIONS = 512
# Both ends may dial at once, and a peer that restarted dials before its old connections are found dead.
MAX_CONNECTIONS_PER_PEER = 4
# Connections that the kernel keeps ready between two accepts; it caps this by net.core.somaxconn itself.
LISTEN_BACKLOG = 1024


class MendedSwarm(Swarm):
    """The library's swarm, with connections that own their tasks and end when they should.

    Its own service machinery is not used (there an exception in any task ends everything): `nursery` runs everything.
    """

    dial: Callable[[ID], Awaitable[None]]
    expected: Callable[[tuple[str, int] | None], ID | None]
    """Who meets us from an address, for whom we are then the one who dialled (farandole.node.mesh.reach.punching)."""
    is_met: Callable[[ID], bool]
    """Whether we and a peer are dialling each other at once."""

    def __init__(
        self,
        peer_id: ID,
        peerstore: IPeerStore,
        upgrader: MendedUpgrader,
        nursery: trio.Nursery,
        ping_interval: float,
        ping_timeout: float,
    ) -> None:
        config = ConnectionConfig(
            max_connections=MAX_CONNECTIONS, min_connections=0, low_watermark=0, high_watermark=MAX_CONNECTIONS
        )
        super().__init__(peer_id, peerstore, upgrader, [], connection_config=config)
        self.background_nursery = nursery
        self.event_background_nursery_created.set()
        self.ping_interval = ping_interval
        self.ping_timeout = ping_timeout
        self.max_connections = MAX_CONNECTIONS
        self.is_offline = False
        """Whether connections that come are refused, and those that are under way given up."""
        self.unread_budget = upgrader.unread_budget
        self._upgrader = upgrader
        self._handshakes = Handshakes()
        self.turns = Turns()
        nursery.start_soon(self.turns.run)

    async def listen_at(self, host: str, port: int) -> None:
        """Accept connections at an address of this machine; `OSError` if it cannot be had."""
        listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            listen_alone(listening)
            if listening.family is socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.bind((host, port))
            share_port(listening)  # once it is bound, so that no second listener can take the same port
            listening.listen(LISTEN_BACKLOG)
        except BaseException:  # nobody else has the socket yet
            listening.close()
            raise
        listener = Listener(listening)
        self.listeners[str(listener.get_addrs()[0])] = listener
        assert self.background_nursery is not None
        self.background_nursery.start_soon(listener.serve, self._admit)
        await trio.lowlevel.checkpoint()

    def _admit(self, connection: socket.socket, host: str) -> None:
        """A connection has come: begin its handshake, or refuse it."""
        if self.is_offline or not self._handshakes.make_room(site_of(host)):
            connection.close()
            return
        pending = Socket(trio.SocketStream(trio.socket.from_stdlib_socket(connection)), self.turns)
        self._handshakes.add(pending)
        assert self.background_nursery is not None
        self.background_nursery.start_soon(self._accept, pending)

    async def _accept(self, pending: Socket) -> None:
        try:
            try:
                with trio.fail_after(HANDSHAKE_TIMEOUT):
                    expected = self.expected(pending.get_remote_address())
                    muxed = await self._upgrade_accepted(pending, expected)
            finally:
                self._handshakes.remove(pending)
            conn = await self.add_conn(muxed, "inbound")
            conn.is_punched = self.is_met(muxed.peer_id)
            await conn.finished.wait()
        except Exception as error:  # handshakes raise whatever strangers' bytes lead to
            logger.debug("inbound connection failed: %r", error)
        finally:
            pending.abort()

    async def upgrade(self, socket: Socket | Circuit, peer_id: ID | None) -> MuxedConn:
        """Authenticate and multiplex a socket; with a peer id as the one who dialled that peer."""
        if isinstance(socket, Circuit):
            raw = RawConnection(socket, peer_id is not None, ConnectionType.RELAYED, socket.addresses)
        else:
            raw = RawConnection(socket, peer_id is not None)
        return await self._multiplex(socket, await self.upgrader.upgrade_security(raw, peer_id is not None, peer_id))

    async def _upgrade_accepted(self, socket: Socket, expected: ID | None) -> MuxedConn:
        """Authenticate and multiplex a connection that has come, which may be the expected peer's part of a punch."""
        if expected is None:
            return await self.upgrade(socket, None)
        raw = RawConnection(socket, False)
        is_initiator = await self._upgrader.find_role(raw)
        return await self._multiplex(socket, await self._upgrader.authenticate(raw, is_initiator, expected))

    async def _multiplex(self, socket: Socket | Circuit, secure: ISecureConn) -> MuxedConn:
        muxed = await self.upgrader.upgrade_connection(secure, secure.get_remote_peer())
        assert isinstance(muxed, MuxedConn)
        socket.finish_handshake()
        return muxed

    async def authenticate(self, socket: Socket, peer_id: ID) -> None:
        """The first half of `upgrade`, for whoever only wants to know who answers."""
        await self.upgrader.upgrade_security(RawConnection(socket, True), True, peer_id)

    async def add_conn(self, muxed_conn: IMuxedConn, direction: str = "unknown") -> MendedConn:
        """Run a multiplexed connection and tell the others of it; `SwarmException` if it is one too many."""
        assert isinstance(muxed_conn, MuxedConn)
        assert self.background_nursery is not None
        if self.is_offline:
            await muxed_conn.secured_conn.close()
            raise SwarmException("this node is offline for now")
        if len(self._live_connections()) >= self.max_connections and not self._make_room(muxed_conn.peer_id):
            await muxed_conn.secured_conn.close()
            raise SwarmException("too many connections, and all of use")
        conn = MendedConn(muxed_conn, self, direction)
        siblings = self.connections.setdefault(muxed_conn.peer_id, [])
        siblings.append(conn)
        if len(siblings) > MAX_CONNECTIONS_PER_PEER:
            cast("MendedConn", siblings[0]).event_closed.set()
        self.background_nursery.start_soon(conn.run)
        await muxed_conn.event_started.wait()
        await conn.event_started.wait()
        await self.notify_connected(conn)
        return conn

    def _live_connections(self) -> list[MendedConn]:
        return [cast("MendedConn", conn) for conn in self.get_connections() if not conn.is_closed]

    def is_needed(self, peer_id: ID) -> bool:
        """Whether the node needs the connection to a peer (`Host.protect`)."""
        return self.unread_budget.is_needed(peer_id)

    def _make_room(self, newcomer: ID) -> bool:
        """End the connection that is of least use; or say no: all the others are of more use than the newcomer's.

        Peers whom the node needs stay. Of strangers, who comes from where most come from goes first, as a stranger with
        many keys has not as many networks; then who has no streams, such as one that a lookup in the DHT left; then
        who has been here for longest.
        """
        strangers = [conn for conn in self._live_connections() if not self.is_needed(conn.muxed_conn.peer_id)]
        idle = [conn for conn in self._live_connections() if not conn.streams]
        if strangers:
            networks = Counter(conn.site.network for conn in strangers)
            addresses = Counter(conn.site.address for conn in strangers)

            def use(conn: MendedConn) -> tuple[int, int, bool, float]:
                return -networks[conn.site.network], -addresses[conn.site.address], bool(conn.streams), conn.opened_at

            min(strangers, key=use).event_closed.set()
        elif idle and self.is_needed(newcomer):
            min(idle, key=lambda conn: conn.opened_at).event_closed.set()
        else:
            return False
        return True

    def _best_connection(self, connections: list[INetConn]) -> INetConn:
        """The library's choice; but the newest of relayed ones, as a circuit is replaced before it ends."""
        direct = [each for each in connections if each.get_connection_type() is not ConnectionType.RELAYED]
        if direct:
            return super()._best_connection(direct)
        return max(connections, key=lambda each: cast("MendedConn", each).opened_at)

    async def dial_peer(self, peer_id: ID) -> list[INetConn]:
        """Connect to a peer by the host's own rules."""
        await self.dial(peer_id)
        return self.get_connections(peer_id)

    def _schedule_auto_connect(self) -> None:
        """Whom to connect to is the node's business."""

    async def close(self) -> None:
        """Stop listening and end every connection."""
        self._closing = True
        for listener in self.listeners.values():
            await listener.close()
        self.listeners.clear()
        async with trio.open_nursery() as nursery:
            for conn in self.get_connections():
                nursery.start_soon(conn.close)
