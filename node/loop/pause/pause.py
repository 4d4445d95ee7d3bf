"""Whether this node rests, and why: it trains while there is no reason to rest.

Reasons come and go apart from each other: who pauses his node by hand in the quiet hours finds it paused when they are
over. A node that rests stays in the mesh: it keeps the run state, relays and gives checkpoints, but has no trainer.
"""

from __future__ import annotations

from typing import Final

import trio

BY_HAND: Final = "by hand"


class Rest:
    """The reasons to rest, by name."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self._changed = trio.Event()

    @property
    def is_on(self) -> bool:
        """Whether there is any."""
        return bool(self._reasons)

    @property
    def words(self) -> str:
        """All of them, for people."""
        return "; ".join(self._reasons.values())

    def begin(self, reason: str, words: str) -> None:
        """There is this reason from now on; ``words`` say it to people, and what ends it."""
        if self._reasons.get(reason) != words:
            self._reasons[reason] = words
            self._tell()

    def end(self, reason: str) -> None:
        """There is not any more."""
        if self._reasons.pop(reason, None) is not None:
            self._tell()

    async def changed(self) -> None:
        """Until the reasons or their words are others."""
        await self._changed.wait()

    def _tell(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()
