"""Begins and ends a node's rest: on its owner's request, which outlives the daemon, and in the quiet hours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final

import trio

from ...base.quiet_hours import QuietHours, parse_quiet_hours, quiet_until
from ...state.store import Store, StoreError
from .pause import BY_HAND, Rest

PAUSED_FACT: Final = "paused"
QUIET: Final = "quiet hours"
# A few seconds more or less of the quiet hours do not matter; a clock that is set is noticed.
LOOK_INTERVAL: Final = 5.0


class RestKeeper:
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
