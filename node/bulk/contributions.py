"""The two contributions of an exchange while they are made and come: the own one on its way out, the partner's judged.

Both are worked on elsewhere, in the trainer process, which encodes the one while it is sent, and decodes the other
while it arrives. Here is what `farandole.node.bulk.exchange_session` needs of that.
"""

from __future__ import annotations

from typing import Protocol

import trio


class Outgoing:
    """The own contribution: ``memory`` is filled from the front, and nothing beyond `num_ready` is to be read."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory.cast("B")
        self.num_ready = 0
        self.digest: bytes | None = None
        """BLAKE3 of all of it; known when all is ready."""
        self._more = trio.Event()

    @classmethod
    def whole(cls, memory: memoryview, digest: bytes) -> Outgoing:
        """One that is encoded already."""
        outgoing = cls(memory)
        outgoing.advance(memory.nbytes, digest)
        return outgoing

    def advance(self, num_ready: int, digest: bytes | None = None) -> None:
        """So many bytes are ready now; with the hash, all are."""
        self.num_ready, self.digest = num_ready, digest
        self._more.set()
        self._more = trio.Event()

    async def wait_beyond(self, position: int) -> int:
        """Until more than ``position`` bytes are ready; how many."""
        while self.num_ready <= position:
            await self._more.wait()
        return self.num_ready

    async def wait_whole(self) -> bytes:
        """Until all is ready; its hash."""
        while self.digest is None:
            await self._more.wait()
        return self.digest


class Judge(Protocol):
    """Who takes the partner's contribution in. What it saw of one that does not commit, it forgets."""

    def take_in(self, num_received: int) -> None:
        """So many bytes, from the front, lie in the memory for what is incoming; their hash is not compared yet."""

    async def refusal(self, size: int, tokens: int) -> str | None:
        """All of it is there, with its hash: why it is refused, or None. ``tokens``: what its offer claims."""
