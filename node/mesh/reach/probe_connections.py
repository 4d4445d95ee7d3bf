"""Probe connections: an extra connection to a peer, from a listening port, to learn how a NAT maps that port.

Over IPv6 peers see the address that this machine has, and over IPv4 they see the router's. So the connection is made
over IPv4 if there is a way, whatever the other connections with the peer use.

One port can have only one connection to one address. So concurrent users share it, and new users wait while it closes.
It is closed by RST: after an orderly close the kernel would keep it in TIME_WAIT for a minute, and refuse the next
one.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from ...base.errors import PeerUnreachableError
from ..connection import Connection
from ..dialler import DIAL_TIMEOUT

if TYPE_CHECKING:
    from ..host import Host

Key = tuple[bytes, int | None]
"""A peer, and the port; None: libp2p's port."""


class ProbeConnections:
    """The probe connections of one host."""

    def __init__(self, host: Host, nursery: trio.Nursery) -> None:
        """``nursery``: lives as long as the host."""
        self._host = host
        self._nursery = nursery
        self._open: dict[Key, _Probe] = {}

    @asynccontextmanager
    async def open(self, peer: bytes, port: int | None, timeout: float) -> AsyncIterator[Connection]:
        """Yield an extra connection to a peer that was dialled, for as long as the block runs.

        ``port``: the local port, over IPv4; None: the listening port. Raises `PeerUnreachableError` if there is no
        connection in ``timeout`` seconds.
        """
        key = peer, port
        with trio.move_on_after(timeout):
            while (probe := self._open.get(key)) is not None and probe.is_unused.is_set():
                await probe.is_over.wait()
        if probe is not None and probe.is_unused.is_set():
            raise PeerUnreachableError("the connection before this one does not end")
        if probe is None:
            probe = self._open[key] = _Probe()
            self._nursery.start_soon(self._hold, key, probe)
        probe.num_users += 1
        try:
            with trio.move_on_after(timeout):
                await probe.is_open.wait()
            if probe.conn is None:
                raise PeerUnreachableError(f"cannot dial it from the port that listens: {probe.error!r}")
            yield probe.conn
        finally:
            probe.num_users -= 1
            if not probe.num_users:
                probe.is_unused.set()

    async def _hold(self, key: Key, probe: _Probe) -> None:
        """Hold a probe connection until it is unused."""
        try:
            conn = await self._dial(*key)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(conn.run)
                await conn.muxed.event_started.wait()
                probe.conn = conn
                probe.is_open.set()
                await probe.is_unused.wait()
                nursery.cancel_scope.cancel()
        except Exception as error:  # whatever the handshakes raise
            probe.error = error
        finally:
            del self._open[key]
            probe.is_open.set()
            probe.is_over.set()

    async def _dial(self, peer: bytes, port: int | None) -> Connection:
        target = self._host.dialled_target(peer)
        if target is None:
            raise PeerUnreachableError("we have no connection with it that we dialled directly")
        with trio.fail_after(DIAL_TIMEOUT):
            if ":" in target[0] and (other := self._host.ipv4_target(peer)) is not None:
                with contextlib.suppress(OSError, PeerUnreachableError):
                    conn = await self._dial_at(peer, other, port)
                    self._host.note_proof(peer, other)
                    return conn
            return await self._dial_at(peer, target, port)

    async def _dial_at(self, peer: bytes, target: tuple[str, int], port: int | None) -> Connection:
        socket = await self._host.dial_from_listener(target, port)
        socket.leave_nothing()
        return Connection(await self._host.upgrader.dial(socket, peer), self._host.connections, is_outbound=True)


class _Probe:
    """One probe connection."""

    def __init__(self) -> None:
        self.num_users = 0
        self.is_open = trio.Event()  # or has failed
        self.is_unused = trio.Event()
        self.is_over = trio.Event()
        self.conn: Connection | None = None
        self.error: Exception | None = None
