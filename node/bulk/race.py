"""The race of a negotiation: both ends dial each other, and the answerer chooses one of the connections that open."""

from __future__ import annotations

import contextlib
import secrets
import socket

import trio
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from farandole.protocol.exchange.bulk import MAX_OFFERED, TOKEN_BYTES, Proposal, is_greeting
from farandole.protocol.wire.ip_addresses import Address

# Connections that wait for the answerer, which chooses one.
MAX_CANDIDATES = 2 * MAX_OFFERED
_CHOSEN = b"\x01"


class Race:
    """The connections of one negotiation, of which the answerer chooses one."""

    def __init__(self, peer: bytes, session: bytes, addresses: list[Address]) -> None:
        """``addresses``: where this node can be dialled."""
        self.peer = peer
        self.session = session
        self.key = X25519PrivateKey.generate()
        public, token = self.key.public_key().public_bytes_raw(), secrets.token_bytes(TOKEN_BYTES)
        self.proposal = Proposal(session=session, token=token, key=public, addresses=addresses)
        self.their_token = b""
        self.is_on = trio.Event()
        self._connections: set[trio.socket.SocketType] = set()
        self._chosen: socket.socket | None = None
        self._has_ended = False
        self._offers, self._offered = trio.open_memory_channel[trio.socket.SocketType](MAX_CANDIDATES)

    def begin(self, theirs: Proposal) -> None:
        """Begin with the other end's proposal."""
        self.their_token = theirs.token
        self.is_on.set()

    def is_greeted_by(self, received: bytes) -> bool:
        """Return whether the other end has sent these bytes."""
        return is_greeting(received, self.session, self.proposal.token)

    def adopt(self, connection: trio.socket.SocketType) -> None:
        """Close this connection at the end, unless it is chosen; at once if the race has ended."""
        if self._has_ended:
            connection.close()
        else:
            self._connections.add(connection)

    def offer(self, connection: trio.socket.SocketType) -> None:
        """Add a connection on which both have greeted. It is skipped if too many came before, or the race is over."""
        with contextlib.suppress(trio.WouldBlock, trio.BrokenResourceError):
            self._offers.send_nowait(connection)

    async def choose(self) -> None:
        """Choose as the answerer: the first connection that takes the message."""
        while True:
            connection = await self._offered.receive()
            with contextlib.suppress(OSError):
                await send_all(connection, _CHOSEN)
                return self._take(connection)

    async def await_choice(self) -> None:
        """Wait as the asker for the connection on which the answerer announces its choice."""

        async def listen_to(connection: trio.socket.SocketType) -> None:
            with contextlib.suppress(OSError):
                if await connection.recv(1) == _CHOSEN and self._chosen is None:
                    self._take(connection)
                    nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            while True:
                nursery.start_soon(listen_to, await self._offered.receive())

    def _take(self, connection: trio.socket.SocketType) -> None:
        self._connections.remove(connection)
        self._chosen = socket.socket(fileno=connection.detach())

    def claim(self) -> socket.socket | None:
        """Return the chosen connection, which the caller then owns."""
        chosen, self._chosen = self._chosen, None
        return chosen

    def end(self) -> None:
        """Close the connections that were not chosen or not claimed, and late ones."""
        self._has_ended = True
        self._offered.close()
        if self._chosen is not None:
            self._chosen.close()
        while self._connections:
            self._connections.pop().close()


async def send_all(connection: trio.socket.SocketType, data: bytes) -> None:
    """Send a few bytes, which a fresh connection takes at once."""
    if await connection.send(data) != len(data):
        raise OSError("the connection takes nothing")
