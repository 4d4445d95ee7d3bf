"""Events of connections that open and close."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import trio


class ConnectionEvents:
    """Connects and disconnects of peers, for one subscriber: an async iterator of (peer, is_connected).

    It holds the latest unread change of every peer, so the number of peers bounds it, whatever the subscriber does. It
    starts with the peers that are connected already.
    """

    def __init__(self, connected: Iterable[bytes]) -> None:
        self._changed = OrderedDict((peer, True) for peer in connected)
        self._wakeup = trio.Event()

    def put(self, peer: bytes, is_connected: bool) -> None:
        """Record a change."""
        self._changed[peer] = is_connected
        self._changed.move_to_end(peer)
        self._wakeup.set()

    def __aiter__(self) -> ConnectionEvents:
        return self

    async def __anext__(self) -> tuple[bytes, bool]:
        await trio.lowlevel.checkpoint()
        while not self._changed:
            self._wakeup = trio.Event()
            await self._wakeup.wait()
        return self._changed.popitem(last=False)
