"""The connections of one host: admission, eviction, and notification of subscribers."""

from __future__ import annotations

import logging
import math
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

from farandole.protocol.wire.identity import peer_id_of

from ..base.errors import PeerUnreachableError
from .admission import STRANGER_SECONDS, FloodedNetworks, Handshakes, Turns, site_of
from .circuit import Circuit
from .connection import Connection, ServeStream
from .connection_events import ConnectionEvents
from .rendezvous import Rendezvous
from .sockets import Listener, Socket
from .upgrading import Upgrader
from .yamux import MuxedConn, UnreadBudget

if TYPE_CHECKING:
    from .gate import Gate

logger = logging.getLogger(__name__)

# Connections in all: a node keeps a dozen and dials partners in addition. With unfinished handshakes and bulk channels
# they fit into the 1,024 descriptors that a process has by default.
MAX_CONNECTIONS = 512
# Both ends may dial at once, and a peer that restarts dials before its old connections are found dead.
MAX_CONNECTIONS_PER_PEER = 4
# Peers that are shut out; when there are more, the oldest is let in again.
MAX_SHUT_OUT = 1024


class ConnectionPool:
    """The live connections of one host, by peer."""

    def __init__(self, nursery: trio.Nursery, serve: ServeStream, ping_interval: float, ping_timeout: float) -> None:
        """``nursery``: runs the connections; ``serve``: serves the streams that peers open."""
        self.serve = serve
        self.ping_interval = ping_interval
        self.ping_timeout = ping_timeout
        self.max_connections = MAX_CONNECTIONS
        self.gate: Gate | None = None
        self.is_offline = False
        """Whether connections are refused, both new ones and ones being made."""
        self.budget = UnreadBudget(self.is_needed)
        self.turns = Turns()
        self._nursery = nursery
        self._by_peer: dict[bytes, list[Connection]] = {}
        self._needs: list[Callable[[bytes], bool]] = []
        self._subscribers: set[ConnectionEvents] = set()
        self._told_connected: set[bytes] = set()
        self._shut_out: dict[bytes, float] = {}  # until when
        self._flooded = FloodedNetworks()
        self._changed = trio.Event()
        nursery.start_soon(self.turns.run)

    @property
    def live(self) -> list[Connection]:
        """The connections that are not about to end."""
        return [conn for peer in self._by_peer for conn in self.of(peer)]

    def of(self, peer: bytes) -> list[Connection]:
        """Return the live connections to a peer."""
        return [conn for conn in self._by_peer.get(peer, ()) if not conn.is_closed]

    def best(self, peer: bytes) -> Connection:
        """Return the connection for new streams: the busiest direct one, else the newest relayed one.

        (A circuit is replaced before it ends.) Raises `PeerUnreachableError` if there is none.
        """

        def use(conn: Connection) -> tuple[bool, float, float]:
            if conn.link.is_relayed:
                return False, 0.0, conn.opened_at
            return True, len(conn.muxed.streams), conn.opened_at

        best = max(self.of(peer), key=use, default=None)
        if best is None:
            raise PeerUnreachableError(f"there is no connection to {peer_id_of(peer)}")
        return best

    # Admission

    async def add(self, muxed: MuxedConn, *, is_outbound: bool, is_punched: bool = False) -> Connection:
        """Run a multiplexed connection and notify subscribers; raise `PeerUnreachableError` if it is refused."""
        if self.is_offline:
            await muxed.link.close()
            raise PeerUnreachableError("this node is offline for now")
        if self.is_shut_out(muxed.peer):
            await muxed.link.close()
            raise PeerUnreachableError(f"{peer_id_of(muxed.peer)} is kept out for a while")
        if not is_outbound and self._comes_too_soon(muxed):
            await muxed.link.close()
            raise PeerUnreachableError(
                f"a peer from {muxed.link.site.network} flooded this node: one stranger in {STRANGER_SECONDS:g} s"
            )
        if len(self.live) >= self.max_connections and not self._make_room(muxed.peer):
            await muxed.link.close()
            raise PeerUnreachableError("too many connections, and all of use")
        conn = Connection(muxed, self, is_outbound=is_outbound, is_punched=is_punched)
        siblings = self._by_peer.setdefault(muxed.peer, [])
        siblings.append(conn)
        if len(siblings) > MAX_CONNECTIONS_PER_PEER:
            siblings[0].end()
        self._nursery.start_soon(conn.run)
        await muxed.event_started.wait()
        self._note_change(muxed.peer)
        return conn

    def _comes_too_soon(self, muxed: MuxedConn) -> bool:
        is_known = self.is_needed(muxed.peer) or bool(self.of(muxed.peer))
        return not is_known and not self._flooded.lets_in(muxed.link.site, trio.current_time())

    def shut_out(self, peer: bytes, seconds: float) -> None:
        """End every connection to a peer that has flooded this node, and refuse new ones for ``seconds``.

        From now on, strangers from the same network are let in one at a time, with pauses.
        """
        self._shut_out.pop(peer, None)
        self._shut_out[peer] = trio.current_time() + seconds
        if len(self._shut_out) > MAX_SHUT_OUT:
            del self._shut_out[next(iter(self._shut_out))]
        for conn in self.of(peer):
            self._flooded.note(conn.link.site, trio.current_time())
            conn.end()

    def is_shut_out(self, peer: bytes) -> bool:
        """Return whether connections to a peer are refused for now."""
        return self._shut_out.get(peer, 0.0) > trio.current_time()

    def remove(self, conn: Connection) -> None:
        """Note that a connection has ended."""
        siblings = self._by_peer.get(conn.peer, [])
        if conn in siblings:
            siblings.remove(conn)
        if not siblings:
            self._by_peer.pop(conn.peer, None)
        self._note_change(conn.peer)

    def protect(self, is_needed: Callable[[bytes], bool]) -> None:
        """Keep connections to peers for which this is true when there are too many. Each call adds peers.

        All other peers are strangers: they share the memory for unread data.
        """
        self._needs.append(is_needed)

    def is_needed(self, peer: bytes) -> bool:
        """Return whether the node needs the connection to a peer (`protect`)."""
        return any(is_needed(peer) for is_needed in self._needs)

    def _make_room(self, newcomer: bytes) -> bool:
        """End the least useful connection; return False if all the others are more useful than the newcomer's.

        Peers that the node needs stay. Of strangers, the ones from the network with most connections go first, as a
        stranger with many keys does not have as many networks; then the ones without streams, such as one that a lookup
        in the DHT left; then the oldest.
        """
        live = self.live
        strangers = [conn for conn in live if not self.is_needed(conn.peer)]
        idle = [conn for conn in live if not conn.is_in_use]
        if strangers:
            networks = Counter(conn.link.site.network for conn in strangers)
            addresses = Counter(conn.link.site.address for conn in strangers)

            def use(conn: Connection) -> tuple[int, int, bool, float]:
                site = conn.link.site
                return -networks[site.network], -addresses[site.address], conn.is_in_use, conn.opened_at

            min(strangers, key=use).end()
        elif idle and self.is_needed(newcomer):
            min(idle, key=lambda conn: conn.opened_at).end()
        else:
            return False
        return True

    # Notification

    @property
    def connected(self) -> frozenset[bytes]:
        """The peers with a live connection."""
        return frozenset(peer for peer in self._by_peer if self.of(peer))

    @contextmanager
    def events(self) -> Iterator[ConnectionEvents]:
        """Subscribe to connects and disconnects, starting with the peers that are connected."""
        events = ConnectionEvents(self._told_connected)
        self._subscribers.add(events)
        try:
            yield events
        finally:
            self._subscribers.discard(events)

    async def wait_for_change(self) -> None:
        """Wait until a connection is opened or closed."""
        await self._changed.wait()

    def _note_change(self, peer: bytes) -> None:
        self._changed.set()
        self._changed = trio.Event()
        is_connected = bool(self.of(peer))
        if is_connected == (peer in self._told_connected):
            return
        if is_connected:
            self._told_connected.add(peer)
        else:
            self._told_connected.discard(peer)
        for events in self._subscribers:
            events.put(peer, is_connected)

    # How a peer's streams travel

    def network_of(self, peer: bytes) -> str:
        """Return the network of a connected peer, an IPv4 /24 or an IPv6 /48; "" if relayed or not connected."""
        return next((conn.link.site.network for conn in self.of(peer)), "")

    def path(self, peer: bytes) -> str:
        """Return how a peer's streams travel: "direct", "punched" (through a hole), "relayed"; "": no connection."""
        connections = self.of(peer)
        direct = [conn for conn in connections if not conn.link.is_relayed]
        if direct:
            return "punched" if all(conn.is_punched for conn in direct) else "direct"
        return "relayed" if connections else ""

    def round_trip(self, peer: bytes) -> float | None:
        """Return seconds to a peer and back, last measured on the path that its streams take; None if not yet."""
        is_relayed = self.path(peer) == "relayed"
        measured = (conn.muxed.round_trip for conn in self.of(peer) if conn.link.is_relayed == is_relayed)
        return min((seconds for seconds in measured if seconds is not None), default=None)

    def is_within(self, peer: bytes, seconds: float) -> bool:
        """Return whether a peer was once reached and back in ``seconds``, over a direct connection that still lives.

        A peer can only make this longer than it is.
        """
        measured = (conn.muxed.least_round_trip for conn in self.of(peer) if not conn.link.is_relayed)
        return any(took is not None and took <= seconds for took in measured)

    def is_called_by(self, peer: bytes) -> bool:
        """Return whether the peer made the relayed connection to it."""
        return any(conn.link.is_relayed and not conn.is_outbound for conn in self.of(peer))

    def retire_relayed(self, peer: bytes, after: float) -> None:
        """End the relayed connections to a peer that is connected directly.

        Connections with bulk under way last until there has been a direct one for ``after`` seconds.
        """
        live = self.of(peer)
        since = min((conn.opened_at for conn in live if not conn.link.is_relayed), default=math.inf)
        for conn in live:
            if conn.link.is_relayed:
                _retire(conn, since + after)

    def worn_circuit(self, peer: bytes, after: float) -> Circuit | None:
        """Return a circuit that this node dialled, that nears its limits and has no replacement yet, if any.

        Replaced circuits end, under the conditions of `retire_relayed`.
        """
        relayed = [conn for conn in self.of(peer) if conn.link.is_relayed]
        newest_at = max((conn.opened_at for conn in relayed), default=math.inf)
        worn = None
        for conn in relayed:
            if conn.is_outbound and isinstance(conn.link, Circuit) and conn.link.is_worn:
                if conn.opened_at < newest_at:
                    _retire(conn, newest_at + after)
                else:
                    worn = conn.link
        return worn

    async def disconnect(self, peer: bytes) -> None:
        """End every connection to a peer."""
        for conn in self.of(peer):
            await conn.close()

    async def close(self) -> None:
        """End every connection."""
        async with trio.open_nursery() as nursery:
            for conn in self.live:
                nursery.start_soon(conn.close)


def _retire(conn: Connection, at: float) -> None:
    """End a connection: at once, or at the time ``at`` if bulk is under way."""
    if trio.current_time() >= at or not any(stream.is_bulk for stream in conn.muxed.streams):
        conn.end()


class Acceptor:
    """The listening sockets of one host, and the handshakes of inbound connections."""

    def __init__(self, nursery: trio.Nursery, pool: ConnectionPool, upgrader: Upgrader, rendezvous: Rendezvous) -> None:
        self.handshakes = Handshakes()
        self._nursery = nursery
        self._pool = pool
        self._upgrader = upgrader
        self._rendezvous = rendezvous
        self._listeners: list[Listener] = []

    @property
    def bound(self) -> list[tuple[str, int]]:
        """IP addresses and ports of the listening sockets."""
        return [listener.bound for listener in self._listeners]

    async def listen(self, host: str, port: int) -> int:
        """Accept connections at an address of this machine and return the port; raise `OSError` if it is taken."""
        listener = Listener(host, port)
        self._listeners.append(listener)
        self._nursery.start_soon(listener.serve, self._admit)
        await trio.lowlevel.checkpoint()
        return listener.bound[1]

    def close(self) -> None:
        """Stop listening."""
        while self._listeners:
            self._listeners.pop().close()

    def _admit(self, connection: socket.socket, host: str) -> None:
        """Begin the handshake of an inbound connection, or refuse it."""
        if self._pool.is_offline or not self.handshakes.make_room(site_of(host)):
            connection.close()
            return
        pending = Socket(trio.SocketStream(trio.socket.from_stdlib_socket(connection)), self._pool.turns)
        self.handshakes.add(pending)
        self._nursery.start_soon(self._accept, pending)

    async def _accept(self, pending: Socket) -> None:
        try:
            try:
                muxed = await self._upgrader.accept(pending, self._rendezvous.expected_at(pending.remote))
            finally:
                self.handshakes.remove(pending)
            is_punched = self._rendezvous.is_met(muxed.peer)
            conn = await self._pool.add(muxed, is_outbound=False, is_punched=is_punched)
            await conn.finished.wait()
        except Exception as error:  # handshakes raise whatever strangers' bytes lead to
            logger.debug("inbound connection failed: %r", error)
        finally:
            pending.abort()
