"""Whether this node rests, and why: on its owner's request, which outlives the daemon, and in the quiet hours.

A node trains while there is no reason to rest. Reasons come and go independently: a node that its owner pauses by hand
during the quiet hours is still paused when they are over. A node that rests stays in the mesh: it keeps the run state,
relays and gives checkpoints, but has no trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final

import trio

from ..base.quiet_hours import QuietHours, parse_quiet_hours, quiet_until
from ..state.store import Store, StoreError

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


PAUSED_FACT: Final = "paused"
QUIET: Final = "quiet hours"
# A few seconds more or less of the quiet hours do not matter; a clock that is set is noticed.
LOOK_INTERVAL: Final = 5.0


class RestService:
    """Pauses the node by hand and in the quiet hours.

    ``hours``: quiet hours, each as `parse_quiet_hours` reads it, which may raise `QuietHoursError`. ``clock`` gives the
    local time; ``warn`` shows a warning to the owner.
    """

    def __init__(
        self,
        rest: Rest,
        store: Store,
        hours: Sequence[str],
        clock: Callable[[], datetime],
        warn: Callable[[str], None],
    ) -> None:
        self._rest = rest
        self._store = store
        self._clock = clock
        self._warn = warn
        self._hours: list[QuietHours] = []
        self._set_hours(hours)

    async def begin(self) -> None:
        """Rest if an earlier life was paused by hand, or in quiet hours; call it before anything else."""
        if await self._store.get_fact(PAUSED_FACT):
            self._pause()
        self._look()

    async def run(self) -> None:
        """Keep the quiet hours, until cancelled."""
        while True:
            self._look()
            await trio.sleep(LOOK_INTERVAL)

    async def pause(self) -> None:
        """Pause until `resume`, in later lives too."""
        self._pause()
        await self._remember(b"1")

    async def resume(self) -> None:
        """End a pause by hand. It does not end the quiet hours, which the owner has set as well."""
        self._rest.end(BY_HAND)
        await self._remember(b"")

    def change_hours(self, hours: Sequence[str]) -> None:
        """Keep other quiet hours until the node ends. Raises `QuietHoursError`."""
        self._set_hours(hours)
        self._look()

    def _set_hours(self, hours: Sequence[str]) -> None:
        self._hours = [parse_quiet_hours(text) for text in hours]
        self._rest.quiet_hours = tuple(hours)

    def _pause(self) -> None:
        self._rest.begin(BY_HAND, "paused; `farandole resume` goes on")

    async def _remember(self, value: bytes) -> None:
        try:
            await self._store.put_fact(PAUSED_FACT, value)
        except StoreError as error:
            self._warn(f"{error}; after a restart this node does not know whether it was paused")

    def _look(self) -> None:
        until = quiet_until(self._hours, self._clock())
        if until is None:
            self._rest.end(QUIET)
        else:
            self._rest.begin(QUIET, f"quiet hours until {until:%a %H:%M}")
