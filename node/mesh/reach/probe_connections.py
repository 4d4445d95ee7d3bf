"""Probe connections: one more to a peer, from a port that listens, to learn what a NAT makes of it.

Of one such port there can be one connection to one place, so all who want it at the same time share it, and who comes
while it ends waits until it has. It ends without a word (RST): of one that ends politely the kernel would remember for
a minute that it was there (TIME_WAIT), and refuse the next.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from ...base.errors import PeerUnreachableError

if TYPE_CHECKING:
    from ..connection import Connection

Key = tuple[bytes, int | None]
"""A peer, and the port; None: that of libp2p."""
Dial = Callable[[Key], Awaitable["Connection"]]


class ProbeConnections:
    """Those of one host."""

    def __init__(self, dial: Dial, nursery: trio.Nursery) -> None:
        """``dial``: makes a connection, and raises what stands against it; ``nursery``: lives as long as the host."""
        self._dial = dial
        self._nursery = nursery
        self._open: dict[Key, _Probe] = {}

    @asynccontextmanager
    async def open(self, key: Key, timeout: float) -> AsyncIterator[Connection]:
        """For as long as the block runs; raises `PeerUnreachableError` if there is none in ``timeout`` seconds."""
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
        """Until nobody uses it."""
        try:
            conn = await self._dial(key)
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


class _Probe:
    """One of them."""

    def __init__(self) -> None:
        self.num_users = 0
        self.is_open = trio.Event()  # or has failed
        self.is_unused = trio.Event()
        self.is_over = trio.Event()
        self.conn: Connection | None = None
        self.error: Exception | None = None
