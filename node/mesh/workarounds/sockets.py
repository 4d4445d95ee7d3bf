"""The TCP sockets under connections, and those that listen for them."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Callable

import trio
from libp2p.abc import IListener
from libp2p.io.exceptions import ConnectionClosedError
from multiaddr import Multiaddr

from ...base.system.sockets import leave_nothing
from ..admission import Turns, site_of
from ..bounded_reads import BoundedReads

logger = logging.getLogger(__name__)

# Taken from it in one pass of the event loop; refusing one costs 0.1 ms.
MAX_ACCEPTS_PER_PASS = 16
# After an accept that failed for want of descriptors.
ACCEPT_PAUSE = 0.5


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
        """As `farandole.node.base.system.sockets.leave_nothing`."""
        leave_nothing(self._stream)

    def abort(self) -> None:
        """`close` without a checkpoint."""
        self._stream.socket.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        """Host and port of the other end (the library's own answers None for IPv6)."""
        return self._remote


class Listener(IListener):
    """One listening socket of a `farandole.node.mesh.workarounds.swarm.MendedSwarm`."""

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
