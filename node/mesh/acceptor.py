"""The listening sockets of one host, and what comes in by them: strangers, and peers that this node dials too."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import trio

from ..base.system.sockets import listen_alone, share_port
from .addresses import OwnAddresses
from .admission import Handshakes, site_of
from .connections import ConnectionPool
from .links import Socket
from .upgrading import Upgrader

logger = logging.getLogger(__name__)

# Connections accepted in one pass of the event loop; refusing one costs 0.1 ms.
MAX_ACCEPTS_PER_PASS = 16
# After an accept that failed because descriptors ran out.
ACCEPT_PAUSE = 0.5
# Connections that the kernel queues between two accepts; it caps this by net.core.somaxconn itself.
LISTEN_BACKLOG = 1024


class Listener:
    """One listening socket."""

    def __init__(self, host: str, port: int) -> None:
        """Bind and listen; raise `OSError` if the address is not available."""
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            listen_alone(self._socket)
            if self._socket.family is socket.AF_INET6:
                self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            self._socket.bind((host, port))
            share_port(self._socket)  # once it is bound, so that no second listener can take the same port
            self._socket.listen(LISTEN_BACKLOG)
            self._socket.setblocking(False)
        except BaseException:  # nothing else owns the socket yet
            self._socket.close()
            raise
        self._serving = trio.CancelScope()
        own, own_port = self._socket.getsockname()[:2]
        self.bound: tuple[str, int] = (str(own), int(own_port))
        """IP address and port."""

    async def serve(self, admit: Callable[[socket.socket, str], None]) -> None:
        """Pass every connection, with the IP address that it comes from, to ``admit`` until `close`."""
        with self._serving:
            while True:
                await trio.lowlevel.checkpoint()  # after `close` there is nothing to wait for
                await trio.lowlevel.wait_readable(self._socket.fileno())
                try:
                    for _ in range(MAX_ACCEPTS_PER_PASS):
                        connection, (host, *_) = self._socket.accept()
                        admit(connection, host)
                except BlockingIOError:
                    pass
                except OSError as error:  # out of descriptors, or the peer is gone again
                    logger.debug("cannot accept a connection: %s", error)
                    await trio.sleep(ACCEPT_PAUSE)

    def close(self) -> None:
        """Stop listening."""
        self._serving.cancel()
        trio.lowlevel.notify_closing(self._socket.fileno())
        self._socket.close()


class Acceptor:
    """The listening sockets of one host, and the handshakes of inbound connections."""

    def __init__(self, nursery: trio.Nursery, pool: ConnectionPool, upgrader: Upgrader, own: OwnAddresses) -> None:
        """``own``: gets the addresses of the listening sockets."""
        self.handshakes = Handshakes()
        self._nursery = nursery
        self._pool = pool
        self._upgrader = upgrader
        self._own = own
        self._expected: dict[bytes, frozenset[str]] = {}
        self._listeners: list[Listener] = []

    @contextmanager
    def expecting(self, peer: bytes, ips: Iterable[str]) -> Iterator[None]:
        """Expect a simultaneous dial of a peer; begin the handshake for it if it comes from these IPs and waits."""
        self._expected[peer] = frozenset(ips)
        try:
            yield
        finally:
            del self._expected[peer]

    async def listen(self, host: str, port: int) -> int:
        """Accept connections at an address of this machine and return the port; raise `OSError` if it is taken."""
        listener = Listener(host, port)
        self._listeners.append(listener)
        self._own.listening.append(listener.bound)
        self._nursery.start_soon(listener.serve, self._admit)
        await trio.lowlevel.checkpoint()
        return listener.bound[1]

    def close(self) -> None:
        """Stop listening."""
        self._own.listening.clear()
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
                muxed = await self._upgrader.accept(pending, self._expected_at(pending.remote))
            finally:
                self.handshakes.remove(pending)
            conn = await self._pool.add(muxed, is_outbound=False, is_punched=muxed.peer in self._expected)
            await conn.finished.wait()
        except Exception as error:  # handshakes raise whatever strangers' bytes lead to
            logger.debug("inbound connection failed: %r", error)
        finally:
            pending.abort()

    def _expected_at(self, remote: tuple[str, int] | None) -> bytes | None:
        """Return the peer that meets us from an address; for it we act as the end that dialled."""
        return next((peer for peer, ips in self._expected.items() if remote and remote[0] in ips), None)
