"""The timer of a sans-IO machine: the one time at which it wants to be told that it has come."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NoReturn

import trio


class Timer:
    """Fires once for each time that is set; `run` keeps it going."""

    def __init__(self) -> None:
        self.at = math.inf
        """By trio's clock."""
        self._changed = trio.Event()

    def set(self, at: float) -> None:
        """Replaces the time before; infinity is never."""
        if at != self.at:
            self.at = at
            self._changed.set()

    async def run(self, fire: Callable[[], None]) -> NoReturn:
        """Until cancelled, or ``fire`` raises."""
        while True:
            changed = self._changed = trio.Event()
            with trio.move_on_at(self.at):
                await changed.wait()
                continue
            self.at = math.inf
            fire()
