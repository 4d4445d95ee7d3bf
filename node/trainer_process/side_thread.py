"""The side thread of a trainer: it does the work of a round's end, in order, while inner steps are taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from farandole.training.engine.between_steps import BetweenSteps


class SideThread:
    """The thread and its queue of work. All calls come from the thread that takes inner steps."""

    def __init__(self, between_steps: BetweenSteps) -> None:
        """``between_steps``: where it hands over the calls that must come between two inner steps."""
        self._between_steps = between_steps
        self._thread = ThreadPoolExecutor(1, "side thread", between_steps.enter_side_thread)
        self._under_way = deque[Future[None]]()

    @property
    def is_busy(self) -> bool:
        """Return whether work is under way, which may wait for `look`."""
        return bool(self._under_way)

    def do(self, work: Callable[[], None], *, is_aside: bool) -> None:
        """Do ``work`` in the side thread, or now; in both cases after the work that was begun before."""
        if is_aside:
            self._under_way.append(self._thread.submit(work))
        else:
            self.settle()
            work()

    def look(self) -> None:
        """Make the calls that were handed over; raise the error of finished work."""
        self._between_steps.serve()
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft().result()

    def settle(self) -> None:
        """Wait until no work is under way; raises its error."""
        while self._under_way:
            self._between_steps.wait_for(self._under_way.popleft())

    def end(self) -> None:
        """Give up the work that is under way: no inner steps follow."""
        self._between_steps.end()
        self._thread.shutdown(wait=False, cancel_futures=True)
