"""Rests while others use the machine, for a node that trains "only when idle".

`IdleWatch` is a pure decision on a series of observations; `IdleService` makes them at intervals, off the event loop
(`farandole.node.loop.idle_probe`). A rest costs the trainer a restart, and training during use costs the owner the
machine. So both ends have a threshold in time: a reason must have been there for `BEGIN_SECONDS` before the node rests,
and all must have been gone for `CALM_SECONDS` before it trains again. If rests follow each other soon, the required
calm doubles, up to `MAX_CALM_SECONDS`: an owner who compiles every few minutes is at work all the time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

import trio

from .idle_probe import GpuProbe, ProbeError, in_a_thread_left_alone, is_on_battery
from .rest_service import Rest


class Reason(Enum):
    """A cause for which a machine is not idle."""

    BATTERY = "battery"
    GPU = "GPU"


# For how long a reason must have been seen. An owner who pulls the plug means it; a program that only asks the driver
# which GPU there is is gone by the next look.
BEGIN_SECONDS: Final = {Reason.BATTERY: 0.0, Reason.GPU: 8.0}
CALM_SECONDS: Final = 60.0
MAX_CALM_SECONDS: Final = 960.0
# A rest that begins within this many seconds of the last one's end follows it soon.
SOON_SECONDS: Final = 600.0


@dataclass(frozen=True, slots=True)
class Seen:
    """One look at the machine; None: unknown, which is no reason to rest."""

    on_battery: bool | None = None
    gpu_users: tuple[str, ...] | None = None
    """Other programs' processes on the GPU, for display."""


class IdleWatch:
    """Judges looks, in order."""

    def __init__(self) -> None:
        self._since: dict[Reason, float] = {}
        self._words = ""
        self._calm_since: float | None = None  # while it rests
        self._calm_needed = CALM_SECONDS
        self._rested_until = -math.inf
        self._has_looked = False

    @property
    def is_resting(self) -> bool:
        """Return whether the last look gave a reason to rest."""
        return bool(self._words)

    def look(self, seen: Seen, now: float) -> str:
        """Return why the node must rest, for display; empty if it may train. ``now``: seconds, never decreasing."""
        found = self._find(seen)
        self._since = {reason: self._since.get(reason, now) for reason in found}
        # Before the first trainer has begun a rest costs nothing.
        is_first, self._has_looked = not self._has_looked, True
        due = [reason for reason in found if is_first or now - self._since[reason] >= BEGIN_SECONDS[reason]]
        if self.is_resting:
            self._go_on(found, now)
        elif due:
            self._begin(found[due[0]], now)
        return self._words

    def _begin(self, words: str, now: float) -> None:
        is_soon = now - self._rested_until < SOON_SECONDS
        self._calm_needed = min(2 * self._calm_needed, MAX_CALM_SECONDS) if is_soon else CALM_SECONDS
        self._calm_since = None
        self._words = self._explain(words)

    def _go_on(self, found: dict[Reason, str], now: float) -> None:
        if found:
            self._calm_since = None
            self._words = self._explain(next(iter(found.values())))
        elif self._calm_since is None:
            self._calm_since = now
        elif now - self._calm_since >= self._calm_needed:
            self._words, self._rested_until = "", now

    def _explain(self, words: str) -> str:
        minutes = self._calm_needed / 60
        after = "a minute" if minutes == 1 else f"{minutes:.0f} minutes"
        return f"{words}; trains again {after} after that ends, or at once without --only-when-idle"

    def _find(self, seen: Seen) -> dict[Reason, str]:
        """Return the reasons against training, the plainest first."""
        found: dict[Reason, str] = {}
        if seen.on_battery:
            found[Reason.BATTERY] = "this machine runs on its battery"
        if seen.gpu_users:
            found[Reason.GPU] = f"the GPU is used by {', '.join(seen.gpu_users)}"
        return found


IN_USE: Final = "in use"
# The owner who starts a game waits for its memory no longer than the game takes to load: two looks and a pause.
LOOK_INTERVAL: Final = 5.0
# For a kernel file that does not answer because a driver hangs.
READ_TIMEOUT: Final = 5.0


class IdleService:
    """Rests while others use the machine.

    ``trainer_pid`` returns the process id of this node's trainer; ``warn`` shows a warning to the owner.
    ``clock`` gives seconds.
    """

    def __init__(
        self,
        rest: Rest,
        watch: IdleWatch,
        trainer_pid: Callable[[], int | None],
        warn: Callable[[str], None],
        *,
        looks_at_gpu: bool = True,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        self._rest = rest
        self._watch = watch
        self._trainer_pid = trainer_pid
        self._warn = warn
        self._looks_at_gpu = looks_at_gpu
        self._clock = clock
        self._gpu = GpuProbe()
        self._has_warned = False

    async def run(self) -> None:
        """Look at intervals, until cancelled."""
        while True:
            await trio.sleep(LOOK_INTERVAL)
            await self.look()

    async def look(self) -> None:
        """Look once; the first look is before anything is trained."""
        own = {os.getpid()} | ({pid} if (pid := self._trainer_pid()) is not None else set())
        users = await self._look_at_gpu(own)
        on_battery = None
        with trio.move_on_after(READ_TIMEOUT):
            on_battery = await in_a_thread_left_alone(is_on_battery)
        words = self._watch.look(Seen(on_battery, users), self._clock())
        if words:
            self._rest.begin(IN_USE, words)
        else:
            self._rest.end(IN_USE)

    async def _look_at_gpu(self, own: set[int]) -> tuple[str, ...] | None:
        if not self._looks_at_gpu:
            return None
        try:
            return await self._gpu.users(own)
        except ProbeError as error:
            if not self._has_warned:
                self._warn(f"who else uses the GPU is not seen: {error}; --only-when-idle looks at the rest")
            self._has_warned = True
            return None
