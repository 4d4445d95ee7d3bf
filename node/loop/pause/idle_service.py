"""Rests while others use the machine: looks at it at intervals, off the event loop, and does what `idle` decides."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

import trio

from .idle import IdleWatch, Seen
from .idle_probe import GpuProbe, ProbeError, in_a_thread_left_alone, is_on_battery
from .pause import Rest

IN_USE: Final = "in use"
# The owner who starts a game waits for its memory no longer than the game takes to load: two looks and a pause.
LOOK_INTERVAL: Final = 5.0
# For a kernel file that does not answer because a driver hangs.
READ_TIMEOUT: Final = 5.0


class IdleKeeper:
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
