"""The thread aside of a trainer: it does the work of a round's end, in order, while inner steps are taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from farandole.training.between_steps import BetweenSteps


class Aside:
    """The thread, and what it has to do. All calls come from the thread that takes inner steps."""

    def __init__(self, between_steps: BetweenSteps) -> None:
        """``between_steps``: where it hands over what it needs of this thread."""
        self._between_steps = between_steps
        self._thread = ThreadPoolExecutor(1, "aside", between_steps.go_aside)
        self._under_way = deque[Future[None]]()

    @property
    def is_busy(self) -> bool:
        """Return whether something is under way, which may need `look`."""
        return bool(self._under_way)

    def do(self, work: Callable[[], None], *, is_aside: bool) -> None:
        """Do it aside, or now; in both cases after what was begun before."""
        if is_aside:
            self._under_way.append(self._thread.submit(work))
        else:
            self.settle()
            work()

    def look(self) -> None:
        """Do what is needed of this thread, and raise the error of what is done."""
        self._between_steps.serve()
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft().result()

    def settle(self) -> None:
        """Wait until nothing is under way; raises its error."""
        while self._under_way:
            self._between_steps.wait_for(self._under_way.popleft())

    def end(self) -> None:
        """Give up what is under way: no inner steps follow."""
        self._between_steps.end()
        self._thread.shutdown(wait=False, cancel_futures=True)
