"""News of connections that come and go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import trio


class ConnectionEvents:
    """Who came and who went, for one subscriber: an async iterator of (peer, is_connected).

    It holds the latest of every peer that changed and was not asked for yet, so it is bounded by the peers that there
    are, whatever the subscriber does. It starts with the peers that are connected already.
    """

    def __init__(self, connected: Iterable[bytes]) -> None:
        self._changed = OrderedDict((peer, True) for peer in connected)
        self._wakeup = trio.Event()

    def put(self, peer: bytes, is_connected: bool) -> None:
        """Note a change."""
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
