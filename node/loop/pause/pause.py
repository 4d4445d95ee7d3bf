"""Whether this node rests, and why: it trains while there is no reason to rest.

Reasons come and go independently: a node that its owner pauses by hand during the quiet hours is still paused when they
are over. A node that rests stays in the mesh: it keeps the run state, relays and gives checkpoints, but has no trainer.
"""

from __future__ import annotations

from typing import Final

import trio

BY_HAND: Final = "by hand"


class Rest:
    """The reasons to rest, by name."""

    def __init__(self) -> None:
        self.quiet_hours: tuple[str, ...] = ()
        """The quiet hours that this node keeps, for display."""
        self._reasons: dict[str, str] = {}
        self._changed = trio.Event()

    @property
    def is_on(self) -> bool:
        """Return whether there is any reason to rest."""
        return bool(self._reasons)

    @property
    def words(self) -> str:
        """Return all reasons, for display."""
        return "; ".join(self._reasons.values())

    def begin(self, reason: str, words: str) -> None:
        """Add a reason; ``words`` describe it, and what ends it, for display."""
        if self._reasons.get(reason) != words:
            self._reasons[reason] = words
            self._tell()

    def end(self, reason: str) -> None:
        """Remove a reason."""
        if self._reasons.pop(reason, None) is not None:
            self._tell()

    async def changed(self) -> None:
        """Wait until the reasons or their words change."""
        await self._changed.wait()

    def _tell(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()
