"""The two contributions of an exchange while they are made and come: the own one on its way out, the partner's judged.

Both are worked on elsewhere, in the trainer process, which encodes the one while it is sent, and decodes the other
while it arrives. How far either is stands in the memory that both processes share. Here is what
`farandole.node.bulk.exchange_session` needs of that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import trio

# How often to look, in seconds, while there is nothing to send: in that time a trainer encodes a few megabytes.
LOOK_INTERVAL: Final = 0.002


class Outgoing:
    """The own contribution: ``memory`` is filled from the front, and nothing beyond `num_ready` is to be read.

    ``look`` returns how many bytes are ready, for what is filled by another process.
    """

    def __init__(self, memory: memoryview, look: Callable[[], int] = lambda: 0) -> None:
        self.memory = memory.cast("B")
        self.digest: bytes | None = None
        """BLAKE3 of all of it; known when all is ready."""
        self._look = look
        self._num_ready = 0
        self._more = trio.Event()

    @classmethod
    def whole(cls, memory: memoryview, digest: bytes) -> Outgoing:
        """One that is encoded already."""
        outgoing = cls(memory)
        outgoing.seal(digest)
        return outgoing

    @property
    def num_ready(self) -> int:
        """Bytes that are ready."""
        return max(self._num_ready, self._look())

    def advance(self, num_ready: int, digest: bytes | None = None) -> None:
        """So many bytes are ready now; with the hash, all are."""
        self._num_ready, self.digest = num_ready, digest
        self._more.set()
        self._more = trio.Event()

    def seal(self, digest: bytes) -> None:
        """All is ready, and this is its hash."""
        self.advance(self.memory.nbytes, digest)

    async def wait_beyond(self, position: int) -> int:
        """Wait until more than ``position`` bytes are ready; returns how many are."""
        while (num_ready := self.num_ready) <= position:
            with trio.move_on_after(LOOK_INTERVAL):
                await self._more.wait()
        return num_ready

    async def wait_whole(self) -> bytes:
        """Wait until all is ready; returns its hash."""
        while self.digest is None:
            await self._more.wait()
        return self.digest


class Judge(Protocol):
    """Who judges the partner's contribution. What it saw of one that does not commit, it forgets."""

    async def refusal(self, size: int, tokens: int) -> str | None:
        """All of it is there, with its hash: why it is refused, or None. ``tokens``: what its offer claims."""
