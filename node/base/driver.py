"""Driver of a sans-IO state machine: passes events in with the time, carries outputs out in order, keeps one timer.

Carrying out an output may cause the next event at once: a message that cannot be queued is a lost peer. The outputs
of such an event are queued behind the pending ones, and the machine is never entered twice.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, NoReturn, TypeVar

import trio

EventT = TypeVar("EventT")
OutputT = TypeVar("OutputT")
Handle = Callable[[EventT, float], Iterable[OutputT]]
"""The method of a state machine of `farandole.protocol` that returns the outputs for an event at monotonic seconds."""


class Driver(Generic[EventT, OutputT]):
    """Drives one machine at a time. ``carry_out`` does what an output asks for; it must not wait.

    ``timer_fired`` is the event of a timer that has come (`set_timer`). ``flush`` is called once all outputs of an
    event are carried out.
    """

    def __init__(
        self,
        carry_out: Callable[[OutputT], None],
        timer_fired: EventT,
        flush: Callable[[], None] = lambda: None,
    ) -> None:
        self.timer_at = math.inf
        """When the timer fires, by trio's clock."""
        self._handle: Handle[EventT, OutputT] | None = None
        self._carry_out = carry_out
        self._timer_fired = timer_fired
        self._flush = flush
        self._outputs: deque[OutputT] = deque()
        self._is_carrying_out = False
        self._armed_at = math.inf
        self._must_rearm = trio.Event()

    def begin(self, handle: Handle[EventT, OutputT]) -> None:
        """Drive the machine of this method from now on."""
        self._handle = handle

    def end(self) -> None:
        """Drop the machine, its outputs that are not carried out yet, and its timer."""
        self._handle = None
        self._outputs.clear()
        self.set_timer(math.inf)

    def handle(self, event: EventT) -> None:
        """Pass an event to the machine, if there is one, and carry out its outputs."""
        if self._handle is None:
            return
        self._outputs.extend(self._handle(event, trio.current_time()))
        if self._is_carrying_out:
            return
        self._is_carrying_out = True
        try:
            while self._outputs:
                self._carry_out(self._outputs.popleft())
            self._flush()
        finally:
            self._is_carrying_out = False

    def set_timer(self, at: float) -> None:
        """Set the time of the next ``timer_fired``, in place of the time before; infinity is never.

        A later time wakes no task: machines move their timers with most events, and each would cost a task switch.
        """
        self.timer_at = at
        if at < self._armed_at:
            self._must_rearm.set()

    async def run(self) -> NoReturn:
        """Fire the timer whenever it is due, until cancelled."""
        while True:
            must_rearm = self._must_rearm = trio.Event()
            self._armed_at = self.timer_at
            with trio.move_on_at(self._armed_at):
                await must_rearm.wait()
                continue
            if trio.current_time() >= self.timer_at:
                self.timer_at = math.inf
                self.handle(self._timer_fired)
