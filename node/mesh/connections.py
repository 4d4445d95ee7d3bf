"""The connections of one host: each owns its tasks and its streams' tasks; the pool admits, evicts and reports them."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Final

import trio

from farandole.protocol.wire.bounds import Latest, TokenBucket
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.identity import peer_id_of, short_name

from ..base.errors import PeerUnreachableError
from .addresses import dial_target
from .links import NEGOTIATION_TIMEOUT, Negotiation, Site, Turns
from .yamux import CLOSE_TIMEOUT, Libp2pStream, MuxedConn, UnreadBudget

logger = logging.getLogger(__name__)

IDENTIFY_PROTOCOL: Final = "/ipfs/id/1.0.0"
# Connections in all: a node keeps a dozen and dials partners in addition. With unfinished handshakes and bulk channels
# they fit into the 1,024 descriptors that a process has by default.
MAX_CONNECTIONS = 512
# Both ends may dial at once, and a peer that restarts dials before its old connections are found dead.
MAX_CONNECTIONS_PER_PEER = 4
# Peers that are shut out; when there are more, the oldest is let in again.
MAX_SHUT_OUT = 1024
# Streams of one connection whose protocol is not agreed yet, and the rate at which they begin: a burst, then a number a
# second. More than any protocol here opens; streams over the limit wait.
MAX_NEGOTIATIONS_PER_CONNECTION = 32
STREAM_BURST, STREAMS_PER_SECOND = 128.0, 32.0
# Handlers at work for one connection; a stream's handler may outlive the stream for a moment.
MAX_HANDLERS_PER_CONNECTION = 256
# Handlers may read what came before a connection ended; then they are cancelled.
HANDLER_GRACE = 5.0
# A peer that floods is shut out, and can come back under another key at no cost. So after a flood, one stranger from
# the same network is let in per `STRANGER_SECONDS`, for `AFTERMATH_SECONDS`. What a peer may send before it is a flood
# costs this node up to 0.6 s: 6 % of a core. A network may hold many homes, whose strangers wait during this time, or
# find no room while the flood lasts: so it applies to internet networks, not to this machine's own and its neighbours.
STRANGER_SECONDS: Final = 10.0
AFTERMATH_SECONDS: Final = 600.0
# Flooded networks that are remembered, the latest ones.
MAX_FLOODED: Final = 1_024


Handler = Callable[[Libp2pStream], Awaitable[None]]


class ProtocolHandlers:
    """The handlers of one host."""

    def __init__(self) -> None:
        self.admits: Callable[[bytes, str], bool] = lambda peer, protocol: True
        """Whether a peer may open streams of a protocol; to others it is one that this node does not serve."""
        self._handlers: dict[str, tuple[Handler, int | None]] = {}

    @property
    def protocols(self) -> list[str]:
        """The protocols that this node serves."""
        return list(self._handlers)

    def set(self, protocol: str, handler: Handler, max_bytes: int | None = None) -> None:
        """Serve a protocol. A stream on which the peer sends more than ``max_bytes`` is reset."""
        self._handlers[protocol] = (handler, max_bytes)

    def remove(self, protocol: str) -> None:
        """Stop serving a protocol."""
        self._handlers.pop(protocol, None)

    async def serve(self, stream: Libp2pStream, note_negotiated: Callable[[], None]) -> None:
        """Agree on a protocol for a stream that a peer has opened, and run its handler. Raises nothing.

        The stream is closed when the handler returns, and reset when it raises, which is logged unless the error is
        the peer's fault or the network's.
        """
        try:
            try:
                with trio.fail_after(NEGOTIATION_TIMEOUT):
                    offered = [protocol for protocol in self._handlers if self.admits(stream.peer, protocol)]
                    stream.protocol = await Negotiation(stream.receive_some, stream.send_all).answer(offered)
                handler, max_bytes = self._handlers[stream.protocol]
            finally:
                note_negotiated()
            if max_bytes is not None:
                stream.limit(max_bytes)
            await handler(stream)
            await stream.aclose()
        except (RemoteProtocolError, trio.BrokenResourceError, trio.TooSlowError) as error:
            logger.debug("a stream of %s ended: %r", stream.protocol, error)
        except Exception:  # a defect of ours: it costs this stream, and neither the others nor the host
            logger.exception("the handler of %s failed", stream.protocol)
        finally:
            stream.reset()


class Connection:
    """One connection; its streams and tasks end with it."""

    def __init__(self, muxed: MuxedConn, pool: ConnectionPool, *, is_outbound: bool, is_punched: bool = False) -> None:
        """``is_outbound``: whether this node dialled; ``is_punched``: whether a hole punch made it."""
        self.muxed = muxed
        self.peer = muxed.peer
        self.link = muxed.link
        self.is_outbound = is_outbound
        self.is_punched = is_punched
        self.opened_at = trio.current_time()
        self.finished = trio.Event()
        self.is_introduced = False
        """Whether the peer has admitted this node (`farandole.node.mesh.gate`)."""
        self.introducing = trio.Lock()
        self._pool = pool
        self._negotiations = trio.Semaphore(MAX_NEGOTIATIONS_PER_CONNECTION)

    @property
    def is_in_use(self) -> bool:
        """Return whether a stream has an agreed protocol; a stream that the peer has not answered does not count."""
        return any(stream.protocol for stream in self.muxed.streams)

    async def run(self) -> None:
        """Run until either end closes, or the watchdog gives the peer up. Raises nothing."""
        try:
            async with trio.open_nursery() as handlers:
                handlers.start_soon(self._serve_streams)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._watch)
                    await self.muxed.start()
                    nursery.cancel_scope.cancel()
                await self._leave()
                handlers.cancel_scope.deadline = trio.current_time() + HANDLER_GRACE
        except Exception:  # a defect costs this connection, and not the host
            logger.warning("the connection to %s failed", short_name(self.peer), exc_info=True)
        finally:
            with trio.CancelScope(deadline=trio.current_time() + CLOSE_TIMEOUT, shield=True):
                await self._leave()

    async def _leave(self) -> None:
        if self.finished.is_set():
            return
        self.finished.set()
        self._pool.remove(self)
        await self.link.close()

    async def open_stream(self, protocol: str) -> Libp2pStream:
        """Open a stream of this protocol; raise `PeerUnreachableError` if that fails."""
        try:
            stream = await self.muxed.open_stream()
            try:
                with trio.fail_after(NEGOTIATION_TIMEOUT):
                    await Negotiation(stream.receive_some, stream.send_all).propose(protocol)
            except BaseException:  # also when cancelled: nothing else owns the stream
                stream.reset()
                raise
        except (RemoteProtocolError, trio.BrokenResourceError, trio.TooSlowError) as error:
            raise PeerUnreachableError(f"{peer_id_of(self.peer)} gives no stream of {protocol}: {error!r}") from error
        stream.protocol = protocol
        return stream

    async def close(self) -> None:
        """Ask the connection to end, and wait until it has."""
        self.muxed.end()
        await self.finished.wait()

    async def _serve_streams(self) -> None:
        """Serve the streams that the peer opens, within the rate limits; further streams wait in the connection."""
        pace = TokenBucket(STREAM_BURST, STREAMS_PER_SECOND, trio.current_time())
        async with trio.open_nursery() as nursery:
            with suppress(trio.BrokenResourceError):
                while True:
                    stream = await self.muxed.accept_stream()
                    await self._negotiations.acquire()
                    is_needed = self._pool.is_needed(self.peer)
                    is_over = self.muxed.event_closed.is_set()
                    if not is_over:
                        await trio.sleep(max(0.0, 1 - pace.available(trio.current_time())) / STREAMS_PER_SECOND)
                        pace.take(trio.current_time())
                        if not is_needed:
                            await self._pool.turns.take(self.link.site)
                    # Streams that a stranger left behind when its connection ended are dropped.
                    is_left = self.muxed.event_closed.is_set() and not is_needed
                    if is_left or len(nursery.child_tasks) >= MAX_HANDLERS_PER_CONNECTION:
                        stream.reset()
                        self._negotiations.release()
                    else:
                        nursery.start_soon(self._pool.handlers.serve, stream, self._negotiations.release)

    async def _watch(self) -> None:
        """Give up a peer that does not answer: frozen, unplugged, or gone without closing.

        Anything received counts as an answer, since a pong may queue behind much data.
        """
        while True:
            before = self.muxed.num_received
            with trio.move_on_after(self._pool.ping_timeout) as deadline:
                await self.muxed.ping()
            if deadline.cancelled_caught and self.muxed.num_received == before:
                logger.info("%s does not answer: closing", short_name(self.peer))
                self.muxed.abort()
            await trio.sleep(self._pool.ping_interval)


class FloodedNetworks:
    """The networks from which floods came. Times are in seconds, of any monotonic clock."""

    def __init__(self) -> None:
        self._flooded = Latest[str, tuple[float, float]](MAX_FLOODED)
        """Network -> until when strangers have to wait there, and when the next one may come in."""

    def note(self, site: Site, now: float) -> None:
        """Note that a peer at this site has flooded this node."""
        if site.is_global:
            _, next_at = self._flooded.get(site.network, (0.0, now + STRANGER_SECONDS))
            self._flooded[site.network] = now + AFTERMATH_SECONDS, next_at

    def lets_in(self, site: Site, now: float) -> bool:
        """Return whether a stranger from this site may come in now; if so, the next one has to wait."""
        until, next_at = self._flooded.get(site.network, (0.0, 0.0))
        if until <= now:
            return True
        if next_at > now:
            return False
        self._flooded[site.network] = until, now + STRANGER_SECONDS
        return True


class ConnectionPool:
    """The live connections of one host, by peer."""

    def __init__(self, nursery: trio.Nursery, handlers: ProtocolHandlers) -> None:
        """``nursery``: runs the connections; ``handlers``: serve the streams that peers open."""
        self.handlers = handlers
        self.ping_interval = self.ping_timeout = 10.0
        self.max_connections = MAX_CONNECTIONS
        self.is_offline = False
        """Whether connections are refused, both new ones and ones being made; `close` ends the others."""
        self.budget = UnreadBudget(self.is_needed)
        self.turns = Turns()
        self._nursery = nursery
        self.by_peer: dict[bytes, list[Connection]] = {}
        """Peer -> its connections, those about to end included; no peer is here without one."""
        self._needs: list[Callable[[bytes], bool]] = []
        self._shut_out = Latest[bytes, float](MAX_SHUT_OUT)  # until when
        self._flooded = FloodedNetworks()
        self.changed = trio.lowlevel.ParkingLot()
        """Where to wait until a connection is opened or closed."""
        nursery.start_soon(self.turns.run)

    @property
    def live(self) -> list[Connection]:
        """The connections that are not about to end."""
        return [conn for peer in self.by_peer for conn in self.of(peer)]

    def of(self, peer: bytes) -> list[Connection]:
        """Return the live connections to a peer."""
        return [conn for conn in self.by_peer.get(peer, ()) if not conn.muxed.is_closing]

    def best(self, peer: bytes) -> Connection:
        """Return the connection for new streams: the busiest direct one, else the newest relayed one.

        Raises `PeerUnreachableError` if there is none.
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
        peer, site, refusal = muxed.peer, muxed.link.site, ""
        is_known = is_outbound or self.is_needed(peer) or bool(self.of(peer))
        if self.is_offline:
            refusal = "this node is offline for now"
        elif self.is_shut_out(peer):
            refusal = f"{peer_id_of(peer)} is kept out for a while"
        elif not is_known and not self._flooded.lets_in(site, trio.current_time()):
            refusal = f"a peer from {site.network} flooded this node: one stranger in {STRANGER_SECONDS:g} s"
        elif len(self.live) >= self.max_connections and not self._make_room(peer):
            refusal = "too many connections, and all of use"
        if refusal:
            await muxed.link.close()
            raise PeerUnreachableError(refusal)
        conn = Connection(muxed, self, is_outbound=is_outbound, is_punched=is_punched)
        siblings = self.by_peer.setdefault(peer, [])
        siblings.append(conn)
        if len(siblings) > MAX_CONNECTIONS_PER_PEER:
            siblings[0].muxed.end()
        self._nursery.start_soon(conn.run)
        self.changed.unpark_all()
        return conn

    def shut_out(self, peer: bytes, seconds: float) -> None:
        """End every connection to a peer that has flooded this node, and refuse new ones for ``seconds``.

        From now on, strangers from the same network are let in one at a time, with pauses.
        """
        self._shut_out[peer] = trio.current_time() + seconds
        for conn in self.of(peer):
            self._flooded.note(conn.link.site, trio.current_time())
            conn.muxed.end()

    def is_shut_out(self, peer: bytes) -> bool:
        """Return whether connections to a peer are refused for now."""
        return self._shut_out.get(peer, 0.0) > trio.current_time()

    def remove(self, conn: Connection) -> None:
        """Note that a connection has ended."""
        siblings = self.by_peer.get(conn.peer, [])
        if conn in siblings:
            siblings.remove(conn)
        if not siblings:
            self.by_peer.pop(conn.peer, None)
        self.changed.unpark_all()

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

            min(strangers, key=use).muxed.end()
        elif idle and self.is_needed(newcomer):
            min(idle, key=lambda conn: conn.opened_at).muxed.end()
        else:
            return False
        return True

    # Notification

    @property
    def connected(self) -> frozenset[bytes]:
        """The peers with a live connection."""
        return frozenset(peer for peer in self.by_peer if self.of(peer))

    async def events(self) -> AsyncGenerator[tuple[bytes, bool], None]:
        """Yield connects and disconnects, (peer, is_connected), starting with the peers that are connected.

        They come from comparing who is connected with what was yielded. So the number of peers bounds them, whatever
        the reader does, and a peer that came and went between two reads is left out.
        """
        reported: set[bytes] = set()
        while True:
            await trio.lowlevel.checkpoint()
            while not (changed := self.by_peer.keys() ^ reported):
                await self.changed.park()
            peer = changed.pop()
            reported ^= {peer}
            yield peer, peer in reported

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

    def is_direct(self, peer: bytes) -> bool:
        """Return whether there is a connection to a peer without a relay."""
        return any(not conn.link.is_relayed for conn in self.of(peer))

    def remote_addresses(self, peer: bytes) -> list[str]:
        """Return the remote multiaddrs of the connections to a peer; a relayed one's has /p2p-circuit in it."""
        return list(dict.fromkeys(conn.link.address for conn in self.of(peer)))

    def dialled_target(self, peer: bytes) -> tuple[str, int] | None:
        """Return the target of a direct connection that this node dialled; None if there is none."""
        targets = (dial_target(conn.link.address, peer) for conn in self.of(peer) if conn.is_outbound)
        return next((target for target in targets if target is not None), None)

    def dialled_ips(self) -> list[str]:
        """Return the IP addresses of the direct connections that this node dialled."""
        direct = (conn.link for conn in self.live if conn.is_outbound and not conn.link.is_relayed)
        return [link.remote[0] for link in direct if link.remote is not None]

    def round_trip(self, peer: bytes) -> float | None:
        """Return seconds to a peer and back, last measured on the path that its streams take; None if not yet."""
        is_relayed = self.path(peer) == "relayed"
        measured = (conn.muxed.state.round_trip for conn in self.of(peer) if conn.link.is_relayed == is_relayed)
        return min((seconds for seconds in measured if seconds is not None), default=None)

    def retire_relayed(self, peer: bytes, after: float) -> None:
        """End the relayed connections to a peer that is connected directly.

        Connections with bulk under way last until there has been a direct one for ``after`` seconds.
        """
        live = self.of(peer)
        since = min((conn.opened_at for conn in live if not conn.link.is_relayed), default=math.inf)
        is_late = trio.current_time() >= since + after
        for conn in live:
            if conn.link.is_relayed and (is_late or not any(stream.is_bulk for stream in conn.muxed.streams)):
                conn.muxed.end()

    async def disconnect(self, peer: bytes) -> None:
        """End every connection to a peer."""
        for conn in self.of(peer):
            await conn.close()

    async def close(self) -> None:
        """End every connection."""
        async with trio.open_nursery() as nursery:
            for conn in self.live:
                nursery.start_soon(conn.close)
