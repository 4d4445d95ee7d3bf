"""Mends for faults of libp2p 0.8.1, each seen by running it.

They are subclasses of the library's own classes, so the library stays as it is for anybody else in the process, and
a test can put the two side by side. What is mended, and where:

- an inbound connection kept a task and one of 250 slots for ever: `MendedConn` owns its tasks and ends with them;
- 256 silent sockets shut everybody else out: admission.py (the one that keeps us waiting for longest makes room);
- a length of 2^31 before authentication was allocated: `Socket` (reads are bounded, and few until the handshake is
  done), `BoundedCommunicator` (negotiation messages are short, and few);
- the end of a connection was read a hundred times, and a message in more pieces than that was an error: `Socket.read`
  gives the whole or an error (bounded_reads.py);
- streams waited for their protocol in any number, and connections closed for newcomers by chance: `MendedConn` begins
  few at a time, `MendedSwarm` closes the one of least use;
- plaintext was accepted: `MendedUpgrader` knows Noise and yamux, nothing else;
- identify and Kademlia read a megabyte or four from anybody: `MendedHost` says how much a peer may send;
- an exception in a stream handler or a connection's task ended the host: `MendedHost`, `MendedConn` guard them;
- a frozen peer's connection was never closed: `MendedConn._watch` (ping, and do without a polite end);
- dialling took one address, waited after success, and blocked a peer for 60 s after a failure: `MendedSwarm.dial_peer`
  hands the matter to `Host.connect`;
- peers with keys other than Ed25519, which have no name here: `MendedUpgrader` refuses them.

Its yamux is replaced altogether: see yamux.py.

In the library's tracker, libp2p/py-libp2p: pull request 1426 (after 0.8.1) takes the slot of an inbound connection
otherwise, but of its being kept nothing was found there; 1485 is sockets that the end of a swarm leaves open; 1438 (in
0.8.1) bounds lengths in the DHT and not in multistream; 417 is an exception that takes the listener down.
"""

from __future__ import annotations

import importlib.metadata
import logging
import math
import os
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import trio
from libp2p.abc import (
    IListener,
    IMuxedConn,
    IMuxedStream,
    INetConn,
    INetStream,
    IPeerStore,
    IRawConnection,
    ISecureConn,
    ISecureTransport,
)
from libp2p.connection_types import ConnectionType
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import AddrsFactory, BasicHost
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.network.config import ConnectionConfig
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.net_stream import NetStream
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError
from libp2p.protocol_muxer.multiselect import Multiselect
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL_ID
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_PROTOCOL_ID
from libp2p.transport.upgrader import TransportUpgrader
from libp2p.utils.varint import read_varint_prefixed_bytes_limited
from multiaddr import Multiaddr

from farandole.protocol.identity import SMALL_ORDER_KEYS, public_key_of
from farandole.protocol.token_bucket import TokenBucket

from ..shaping import Shaping
from .admission import Handshakes, Turns, site_of
from .bounded_reads import BoundedReads
from .circuit import Circuit
from .reuse import let_dials_share
from .yamux import Commons, YamuxConn, YamuxStream

logger = logging.getLogger(__name__)

MENDED_RELEASE = "0.8.1"
if importlib.metadata.version("libp2p") != MENDED_RELEASE:
    raise ImportError(
        f"farandole mends faults of libp2p {MENDED_RELEASE}, and this is {importlib.metadata.version('libp2p')}: "
        f"install libp2p=={MENDED_RELEASE}"
    )

# The library reports every peer's every fault, at any level; what matters of it is logged here.
if "LIBP2P_DEBUG" not in os.environ:
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)

# From accepting a socket to an authenticated, multiplexed connection. Five round trips at 400 ms fit twice.
HANDSHAKE_TIMEOUT = 5.0
# A multistream message is a protocol id; go-libp2p allows 1,024 bytes too.
MAX_NEGOTIATION_BYTES = 1024
# Messages of one negotiation: the greeting, and proposals; who knows us proposes one.
MAX_NEGOTIATION_MESSAGES = 16
# What a peer may send on one stream of the library's protocols, which read up to 4 MiB at a time. Of identify as much
# as go-libp2p takes (the library keeps it); of Kademlia twenty peers with all their addresses fit; of ping 4,096.
MAX_IDENTIFY_BYTES = 8 * 1024
MAX_LIBRARY_BYTES = 128 * 1024
NEGOTIATION_TIMEOUT = 8
IDENTIFY_TIMEOUT = 10.0
# A peer that has dialled proposes its first protocol within a round trip of the greetings.
ROLE_PAUSE = 0.7
# Connections in all: a node keeps a dozen and dials partners beside them. With unfinished handshakes and bulk channels
# they fit into the 1,024 descriptors that a process has by default.
MAX_CONNECTIONS = 512
# Both ends may dial at once, and a peer that restarted dials before its old connections are found dead.
MAX_CONNECTIONS_PER_PEER = 4
# For the last words of a connection; whoever does not take them is cut off.
CLOSE_TIMEOUT = 1.0
# Streams of one connection whose protocol is not agreed yet, and how fast they begin: so many at once, then so many a
# second. More than any protocol here opens; what comes beyond waits its turn.
MAX_NEGOTIATIONS_PER_CONNECTION = 32
STREAM_BURST, STREAMS_PER_SECOND = 128.0, 32.0
# Handlers at work for one connection; a stream's handler may outlive the stream for a moment.
MAX_HANDLERS_PER_CONNECTION = 256
# Handlers may read what came before a connection ended; then they are cancelled.
HANDLER_GRACE = 5.0
# Connections that the kernel keeps ready between two accepts; it caps this by net.core.somaxconn itself.
LISTEN_BACKLOG = 1024
# Taken from it in one pass of the event loop; refusing one costs 0.1 ms.
MAX_ACCEPTS_PER_PASS = 16
# After an accept that failed for want of descriptors.
ACCEPT_PAUSE = 0.5
# How long the library's peer store believes an address that somebody told it, in seconds.
PEER_ADDRESS_TTL = 3600


class Socket(BoundedReads):
    """A TCP socket as the library reads it, with a bound on every read and on all reads of a handshake.

    With ``turns``, what comes before the handshake is done is taken up when it is this site's turn.
    """

    transport = "tcp"

    def __init__(self, stream: trio.SocketStream, turns: Turns | None = None) -> None:
        super().__init__()
        self._stream = stream
        self._turns = turns
        self.num_received = 0
        self.waiting_since = math.inf
        try:
            host, port = stream.socket.getpeername()[:2]
            self._remote: tuple[str, int] | None = (str(host), int(port))
        except OSError:
            self._remote = None
        self.site = site_of(self._remote[0] if self._remote else "")

    async def _receive(self) -> bytes:
        is_shaking_hands = self.is_shaking_hands
        data = await super()._receive()
        self.num_received += len(data)
        if is_shaking_hands and self._turns is not None:
            await self._turns.take(self.site)
        return data

    async def _receive_some(self, max_bytes: int) -> bytes:
        self.waiting_since = trio.current_time()
        try:
            return bytes(await self._stream.receive_some(max_bytes))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError("connection reset", transport="tcp") from error
        finally:
            self.waiting_since = math.inf

    async def write(self, data: bytes) -> None:
        """All of it; `ConnectionClosedError` when the connection is gone, at whichever end."""
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError("connection closed", transport="tcp") from error

    async def close(self) -> None:
        """Close at once; whoever waits on the socket is woken."""
        await self._stream.aclose()

    def leave_nothing(self) -> None:
        """When it ends, end it without a word (RST): the kernel remembers no such connection then (TIME_WAIT)."""
        self._stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def abort(self) -> None:
        """`close` without a checkpoint."""
        self._stream.socket.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        """Host and port of the other end (the library's own answers None for IPv6)."""
        return self._remote


class BoundedCommunicator(MultiselectCommunicator):
    """Multistream messages of at most `MAX_NEGOTIATION_BYTES`, and at most `MAX_NEGOTIATION_MESSAGES` of them."""

    _num_read = 0

    async def read(self) -> str:
        """One message; `MultiselectCommunicatorError` for anything that is not one, or one too many."""
        self._num_read += 1
        if self._num_read > MAX_NEGOTIATION_MESSAGES:
            raise MultiselectCommunicatorError("too many negotiation messages")
        try:
            message = await read_varint_prefixed_bytes_limited(self.read_writer, MAX_NEGOTIATION_BYTES)
            if not message.endswith(b"\n"):
                raise MultiselectCommunicatorError("negotiation message without its newline")
            return message[:-1].decode()
        except MultiselectCommunicatorError:
            raise
        except Exception as error:
            raise MultiselectCommunicatorError("no negotiation message") from error


class MendedUpgrader(TransportUpgrader):
    """From a raw connection to a secure one to a multiplexed one: Noise, then yamux, and nothing else."""

    def __init__(self, noise: ISecureTransport, shaping: Shaping | None = None) -> None:
        super().__init__({NOISE_PROTOCOL_ID: noise}, {TProtocol(YAMUX_PROTOCOL_ID): YamuxConn})
        self.commons = Commons()
        self._noise = noise
        self._shaping = shaping

    async def _negotiate(self, conn: Any, protocol: TProtocol, is_initiator: bool) -> None:
        communicator = BoundedCommunicator(conn)
        if is_initiator:
            await MultiselectClient().select_one_of([protocol], communicator, NEGOTIATION_TIMEOUT)
        else:
            await Multiselect({protocol: None}).negotiate(communicator, NEGOTIATION_TIMEOUT)

    async def upgrade_security(
        self, raw_conn: IRawConnection, is_initiator: bool, peer_id: ID | None = None
    ) -> ISecureConn:
        """Authenticate the other end; the initiator says whom it expects, and anybody else is refused.

        Raises whatever the library does: the callers take every exception for a failed handshake.
        """
        await self._negotiate(raw_conn, NOISE_PROTOCOL_ID, is_initiator)
        return await self.authenticate(raw_conn, is_initiator, peer_id)

    async def find_role(self, raw_conn: IRawConnection) -> bool:
        """Negotiate on an accepted connection, of which a peer that waits for us may be the other end.

        Whether that is so: it proposes nothing, and we are the initiator. Who dials as others do proposes at once.
        """
        communicator = BoundedCommunicator(raw_conn)
        await Multiselect({}).handshake(communicator)
        proposal = None
        with trio.move_on_after(ROLE_PAUSE):
            proposal = await communicator.read()
        if proposal not in (None, NOISE_PROTOCOL_ID):
            raise SwarmException("it proposes something else")
        await communicator.write(NOISE_PROTOCOL_ID)
        if proposal is None and await communicator.read() != NOISE_PROTOCOL_ID:
            raise SwarmException("it knows something else")
        return proposal is None

    async def authenticate(
        self, raw_conn: IRawConnection, is_initiator: bool, peer_id: ID | None = None
    ) -> ISecureConn:
        """The handshake of `upgrade_security`, once it is negotiated."""
        if not is_initiator:
            secure = await self._noise.secure_inbound(raw_conn)
        elif peer_id is None:
            raise SwarmException("dialling needs the peer's id")
        else:
            secure = await self._noise.secure_outbound(raw_conn, peer_id)
            if secure.get_remote_peer() != peer_id:
                raise SwarmException(f"{secure.get_remote_peer()} answered for {peer_id}")
        # Peers are named by Ed25519 keys here, and one of small order proves nothing.
        if public_key_of(secure.get_remote_peer().to_base58()) in SMALL_ORDER_KEYS:
            raise SwarmException("a key of small order")
        return secure

    async def upgrade_connection(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        """Multiplex a secure connection."""
        await self._negotiate(conn, TProtocol(YAMUX_PROTOCOL_ID), conn.is_initiator)
        return YamuxConn(conn, peer_id, self._shaping, self.commons)


class MendedConn(SwarmConn):
    """A connection that owns its tasks and those of its streams, and takes them along when it ends."""

    muxed_conn: YamuxConn

    def __init__(self, muxed_conn: YamuxConn, swarm: MendedSwarm, direction: str) -> None:
        super().__init__(muxed_conn, swarm, direction)
        self.set_transport_info(muxed_conn.get_transport_addresses(), muxed_conn.get_connection_type())
        self.finished = trio.Event()
        self.opened_at = trio.current_time()
        remote = muxed_conn.get_remote_address()
        self.site = site_of(remote[0] if remote else "")
        self._negotiating: set[IMuxedStream] = set()
        self._negotiations = trio.Semaphore(MAX_NEGOTIATIONS_PER_CONNECTION)
        self.is_punched = False
        self._mended_swarm = swarm

    async def run(self) -> None:
        """Until either end closes, or the watchdog gives the peer up. Raises nothing."""
        try:
            async with trio.open_nursery() as handlers:
                handlers.start_soon(self._serve_streams)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.muxed_conn.start)
                    nursery.start_soon(self._watch)
                    nursery.start_soon(self._close_when_asked)
                    await self.muxed_conn.event_closed.wait()
                    nursery.cancel_scope.cancel()
                await self._leave()
                handlers.cancel_scope.deadline = trio.current_time() + HANDLER_GRACE
        except Exception:
            logger.warning("the connection to %s failed", self.muxed_conn.peer_id, exc_info=True)
        finally:
            with trio.CancelScope(deadline=trio.current_time() + CLOSE_TIMEOUT, shield=True):
                await self._leave()

    async def _leave(self) -> None:
        if self.finished.is_set():
            return
        self.event_closed.set()
        self.finished.set()
        self._mended_swarm.remove_conn(self)
        await self.muxed_conn.secured_conn.close()
        await self._mended_swarm.notify_disconnected(self)

    async def _close_when_asked(self) -> None:
        await self.event_closed.wait()
        with trio.move_on_after(CLOSE_TIMEOUT):
            await self.muxed_conn.close()
        self.muxed_conn.abort()

    async def _serve_streams(self) -> None:
        """Begin what the other end opens, no faster than the bounds say; the rest waits at the connection."""
        self.event_started.set()
        pace = TokenBucket(STREAM_BURST, STREAMS_PER_SECOND, trio.current_time())
        async with trio.open_nursery() as nursery:
            with suppress(MuxedConnUnavailable):
                while True:
                    stream = await self.muxed_conn.accept_stream()
                    await self._negotiations.acquire()
                    is_needed = self._mended_swarm.is_needed(self.muxed_conn.peer_id)
                    if not self.muxed_conn.is_closed:
                        await trio.sleep(max(0.0, 1 - pace.available(trio.current_time())) / STREAMS_PER_SECOND)
                        pace.take(trio.current_time())
                        if not is_needed:
                            await self._mended_swarm.turns.take(self.site)
                    self._negotiating.add(stream)
                    if self.muxed_conn.is_closed and not is_needed:
                        await stream.reset()  # what a stranger has left behind is nobody's
                        self.note_negotiated(stream)
                    elif len(nursery.child_tasks) < MAX_HANDLERS_PER_CONNECTION:
                        nursery.start_soon(self._handle_stream, stream)
                    else:
                        await stream.reset()
                        self.note_negotiated(stream)

    async def _handle_stream(self, stream: IMuxedStream) -> None:
        try:
            await self._handle_muxed_stream(stream)
        finally:
            self.note_negotiated(stream)

    def note_negotiated(self, stream: IMuxedStream) -> None:
        """A stream that the other end opened has its protocol, or has none: another may begin."""
        if stream in self._negotiating:
            self._negotiating.remove(stream)
            self._negotiations.release()

    async def close(self) -> None:
        """Ask the connection to end, and wait until it has."""
        self.event_closed.set()
        await self.finished.wait()

    async def _watch(self) -> None:
        """Give up a peer that answers nothing: frozen, unplugged, or gone without a word.

        Anything received counts as an answer, since a pong may queue behind much data.
        """
        while True:
            before = self.muxed_conn.num_received
            with trio.move_on_after(self._mended_swarm.ping_timeout) as deadline:
                await self.muxed_conn.ping()
            if deadline.cancelled_caught and self.muxed_conn.num_received == before:
                logger.info("%s does not answer: closing", self.muxed_conn.peer_id)
                self.muxed_conn.abort()
            await trio.sleep(self._mended_swarm.ping_interval)


class Listener(IListener):
    """One listening socket of `MendedSwarm`."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._listener.setblocking(False)
        self._serving = trio.CancelScope()

    async def serve(self, admit: Callable[[socket.socket, str], None]) -> None:
        """Hand over every connection, with the IP address that it comes from, until `close`."""
        with self._serving:
            while True:
                await trio.lowlevel.checkpoint()  # where `close` has come first, there is nothing to wait for
                await trio.lowlevel.wait_readable(self._listener.fileno())
                try:
                    for _ in range(MAX_ACCEPTS_PER_PASS):
                        connection, (host, *_) = self._listener.accept()
                        admit(connection, host)
                except BlockingIOError:
                    pass
                except OSError as error:  # out of descriptors, or the peer is gone again
                    logger.debug("cannot accept a connection: %s", error)
                    await trio.sleep(ACCEPT_PAUSE)

    async def listen(self, maddr: Multiaddr) -> None:
        """It listens already."""

    def get_addrs(self) -> tuple[Multiaddr, ...]:
        """Where the socket is bound, with its real port."""
        host, port = self._listener.getsockname()[:2]
        return (Multiaddr(f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}"),)

    async def close(self) -> None:
        """Stop listening."""
        self._serving.cancel()
        trio.lowlevel.notify_closing(self._listener.fileno())
        self._listener.close()
        await trio.lowlevel.checkpoint()


class MendedSwarm(Swarm):
    """The library's swarm, with connections that own their tasks and end when they should.

    Its own service machinery is not used (there an exception in any task ends everything): `nursery` runs everything.
    """

    dial: Callable[[ID], Awaitable[None]]
    expected: Callable[[tuple[str, int] | None], ID | None]
    """Who meets us from an address, for whom we are then the one who dialled (farandole.node.reach.punching)."""
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
        self.commons = upgrader.commons
        self._upgrader = upgrader
        self._handshakes = Handshakes()
        self.turns = Turns()
        nursery.start_soon(self.turns.run)

    async def listen_at(self, host: str, port: int) -> None:
        """Accept connections at an address of this machine; `OSError` if it cannot be had."""
        listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if listening.family is socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.bind((host, port))
            let_dials_share(listening)
            listening.listen(LISTEN_BACKLOG)
        except BaseException:
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
        except Exception as error:
            logger.debug("inbound connection failed: %r", error)
        finally:
            pending.abort()

    async def upgrade(self, socket: Socket | Circuit, peer_id: ID | None) -> YamuxConn:
        """Authenticate and multiplex a socket; with a peer id as the one who dialled that peer."""
        if isinstance(socket, Circuit):
            raw = RawConnection(socket, peer_id is not None, ConnectionType.RELAYED, socket.addresses)
        else:
            raw = RawConnection(socket, peer_id is not None)
        return await self._multiplex(socket, await self.upgrader.upgrade_security(raw, peer_id is not None, peer_id))

    async def _upgrade_accepted(self, socket: Socket, expected: ID | None) -> YamuxConn:
        """Authenticate and multiplex a connection that has come, which may be the expected peer's part of a punch."""
        if expected is None:
            return await self.upgrade(socket, None)
        raw = RawConnection(socket, False)
        is_initiator = await self._upgrader.find_role(raw)
        return await self._multiplex(socket, await self._upgrader.authenticate(raw, is_initiator, expected))

    async def _multiplex(self, socket: Socket | Circuit, secure: ISecureConn) -> YamuxConn:
        muxed = await self.upgrader.upgrade_connection(secure, secure.get_remote_peer())
        assert isinstance(muxed, YamuxConn)
        socket.finish_handshake()
        return muxed

    async def authenticate(self, socket: Socket, peer_id: ID) -> None:
        """The first half of `upgrade`, for whoever only wants to know who answers."""
        await self.upgrader.upgrade_security(RawConnection(socket, True), True, peer_id)

    async def add_conn(self, muxed_conn: IMuxedConn, direction: str = "unknown") -> MendedConn:
        """Run a multiplexed connection and tell the others of it; `SwarmException` if it is one too many."""
        assert isinstance(muxed_conn, YamuxConn)
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
        return self.commons.is_needed(peer_id)

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


class MendedHost(BasicHost):
    """The library's host, whose stream handlers may fail and cost only their stream."""

    _network: MendedSwarm

    def __init__(self, network: MendedSwarm, addrs_factory: AddrsFactory) -> None:
        self.external_addresses: list[Multiaddr] = []
        """Of this host as others see it, and through relays; each ends in its peer id."""
        # What peers observe is asked for in dialback.py, over connections from the port that listens.
        super().__init__(network, addrs_factory=addrs_factory, disable_identify_address_discovery=True)

    def get_addrs(self) -> list[Multiaddr]:
        """What this host advertises: the addresses that it has, and those that others reach it at."""
        own = self.own_addrs()
        return [*own, *(address for address in self.external_addresses if address not in own)]

    def own_addrs(self) -> list[Multiaddr]:
        """The addresses of this machine's interfaces at which this host listens."""
        return super().get_addrs()

    async def connect(self, peer_info: PeerInfo) -> None:
        """Connect by the host's own rules."""
        self.peerstore.add_addrs(peer_info.peer_id, peer_info.addrs, PEER_ADDRESS_TTL)
        await self._network.dial(peer_info.peer_id)

    async def new_stream(self, peer_id: ID, protocol_ids: Sequence[TProtocol]) -> INetStream:
        """A stream of the first of the protocols that the peer speaks, connecting if need be."""
        return await self._negotiate(await self._network.new_stream(peer_id), protocol_ids)

    async def new_stream_on(self, conn: MendedConn, protocol_id: TProtocol) -> NetStream:
        """A stream of a protocol on this very connection."""
        stream = await conn.new_stream()
        await self._negotiate(stream, [protocol_id])
        return stream

    async def _negotiate(self, stream: INetStream, protocol_ids: Sequence[TProtocol]) -> INetStream:
        try:
            protocol = await self.multiselect_client.select_one_of(
                protocol_ids, BoundedCommunicator(stream), NEGOTIATION_TIMEOUT
            )
        except BaseException:
            cast("YamuxStream", cast("NetStream", stream).muxed_stream).break_off()
            raise
        _limit(stream, protocol)
        stream.set_protocol(protocol)
        return stream

    def _schedule_identify(self, peer_id: ID, *, reason: str) -> None:
        # The library runs this outside of every nursery, where an exception would end the program.
        if peer_id != self.get_id() and peer_id not in self._identify_inflight:
            self._identify_inflight.add(peer_id)
            assert self._network.background_nursery is not None
            self._network.background_nursery.start_soon(self._identify_task_entry, peer_id, reason)

    async def _identify_task_entry(self, peer_id: ID, reason: str) -> None:
        try:
            with trio.move_on_after(IDENTIFY_TIMEOUT):
                await self._identify_peer(peer_id, reason=reason)
        except Exception:
            logger.debug("identifying %s failed", peer_id, exc_info=True)
        finally:
            self._identify_inflight.discard(peer_id)

    async def _swarm_stream_handler(self, net_stream: INetStream) -> None:
        try:
            try:
                communicator = BoundedCommunicator(net_stream)
                protocol, handler = await self.multiselect.negotiate(communicator, NEGOTIATION_TIMEOUT)
            finally:
                stream = cast("NetStream", net_stream)
                cast("MendedConn", stream.swarm_conn).note_negotiated(stream.muxed_stream)
            if protocol is None or handler is None:
                raise SwarmException("no protocol")
            _limit(net_stream, protocol)
            net_stream.set_protocol(protocol)
            await handler(net_stream)
            cast("YamuxStream", cast("NetStream", net_stream).muxed_stream).abandon()
        except Exception as error:
            logger.debug("a stream of %s failed: %r", net_stream.muxed_conn.peer_id, error)
            await net_stream.reset()


def _limit(stream: INetStream, protocol: str) -> None:
    """Bound what a peer sends on a stream that the library reads."""
    if protocol.startswith("/ipfs/"):
        is_identify = protocol.startswith("/ipfs/id/")
        muxed_stream = cast("YamuxStream", cast("NetStream", stream).muxed_stream)
        muxed_stream.limit(MAX_IDENTIFY_BYTES if is_identify else MAX_LIBRARY_BYTES)
