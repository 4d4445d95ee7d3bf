"""The TCP sockets of connections, and the listening sockets."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Callable

import trio

from ..base.system.sockets import leave_nothing, listen_alone, send_now, share_port
from .addresses import multiaddr_of
from .admission import Turns
from .raw_link import RawLink

logger = logging.getLogger(__name__)

# Connections accepted in one pass of the event loop; refusing one costs 0.1 ms.
MAX_ACCEPTS_PER_PASS = 16
# After an accept that failed because descriptors ran out.
ACCEPT_PAUSE = 0.5
# Connections that the kernel queues between two accepts; it caps this by net.core.somaxconn itself.
LISTEN_BACKLOG = 1024


class Socket(RawLink):
    """A TCP socket. With ``turns``, data before the end of the handshake is processed when its site has a turn."""

    def __init__(self, stream: trio.SocketStream, turns: Turns | None = None) -> None:
        try:
            host, port = stream.socket.getpeername()[:2]
        except OSError:  # it is gone already
            super().__init__(stream, "", None)
        else:
            super().__init__(stream, multiaddr_of(str(host).partition("%")[0], int(port)), (str(host), int(port)))
        self._stream = stream
        self._turns = turns
        self.waiting_since = math.inf

    async def _receive(self) -> bytes:
        is_shaking_hands = self.is_shaking_hands
        data = await super()._receive()
        if is_shaking_hands and self._turns is not None:
            await self._turns.take(self.site)
        return data

    async def _receive_some(self, max_bytes: int) -> bytes:
        self.waiting_since = trio.current_time()
        try:
            return await super()._receive_some(max_bytes)
        finally:
            self.waiting_since = math.inf

    def _send_now(self, data: bytes) -> int:
        return send_now(self._stream.socket.fileno(), data)

    def leave_nothing(self) -> None:
        """See `farandole.node.base.system.sockets.leave_nothing`."""
        leave_nothing(self._stream)

    def abort(self) -> None:
        """See `RawLink`."""
        self._stream.socket.close()


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
