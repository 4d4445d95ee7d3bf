"""Connections beside the one that a peer has: from a port that listens, to learn what a NAT makes of it.

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
    from ..workarounds.connection import MendedConn

Key = tuple[bytes, int | None]
"""A peer, and the port; None: that of libp2p."""
Dial = Callable[[Key], Awaitable["MendedConn"]]


class Asides:
    """Those of one host."""

    def __init__(self, dial: Dial, nursery: trio.Nursery) -> None:
        """``dial``: makes a connection, and raises what stands against it; ``nursery``: lives as long as the host."""
        self._dial = dial
        self._nursery = nursery
        self._open: dict[Key, _Aside] = {}

    @asynccontextmanager
    async def open(self, key: Key, timeout: float) -> AsyncIterator[MendedConn]:
        """For as long as the block runs; raises `PeerUnreachableError` if there is none in ``timeout`` seconds."""
        with trio.move_on_after(timeout):
            while (aside := self._open.get(key)) is not None and aside.is_unused.is_set():
                await aside.is_over.wait()
        if aside is not None and aside.is_unused.is_set():
            raise PeerUnreachableError("the connection before this one does not end")
        if aside is None:
            aside = self._open[key] = _Aside()
            self._nursery.start_soon(self._hold, key, aside)
        aside.num_users += 1
        try:
            with trio.move_on_after(timeout):
                await aside.is_open.wait()
            if aside.conn is None:
                raise PeerUnreachableError(f"cannot dial it from the port that listens: {aside.error!r}")
            yield aside.conn
        finally:
            aside.num_users -= 1
            if not aside.num_users:
                aside.is_unused.set()

    async def _hold(self, key: Key, aside: _Aside) -> None:
        """Until nobody uses it."""
        try:
            conn = await self._dial(key)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(conn.run)
                await conn.event_started.wait()
                aside.conn = conn
                aside.is_open.set()
                await aside.is_unused.wait()
                nursery.cancel_scope.cancel()
        except Exception as error:  # whatever the handshakes raise
            aside.error = error
        finally:
            del self._open[key]
            aside.is_open.set()
            aside.is_over.set()


class _Aside:
    """One of them."""

    def __init__(self) -> None:
        self.num_users = 0
        self.is_open = trio.Event()  # or has failed
        self.is_unused = trio.Event()
        self.is_over = trio.Event()
        self.conn: MendedConn | None = None
        self.error: Exception | None = None
