"""The side thread of a round's end: it works while the other thread takes inner steps.

While a GPU takes inner steps, the end of the previous round can be computed in the host's memory. Some of its
operations use what inner steps use (the weights, the module): they are handed over, to be done between two steps.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

Result = TypeVar("Result")


class SideThread:
    """The thread, its work in order, and the calls that it has handed over.

    It begins with the first work. All methods except `call` are for the thread that takes inner steps.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "side thread", self._enter)
        self._thread_id: int | None = None
        self._under_way = deque[Future[None]]()
        self._calls = SimpleQueue[Callable[[], None] | None]()
        self._is_over = False

    def _enter(self) -> None:
        self._thread_id = threading.get_ident()

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

    def call(self, function: Callable[[], Result]) -> Result:
        """Call a function between two inner steps: the side thread waits until the other one has called it.

        Returns what it returns and raises what it raises; raises `CancelledError` after `end`. Called in another thread
        than the side thread, it makes the call at once.
        """
        if threading.get_ident() != self._thread_id:
            return function()
        answer = Future[Result]()
        self._calls.put(partial(self._make, function, answer))
        if self._is_over:  # `end` might not have seen it
            raise CancelledError
        return answer.result()

    def _make(self, function: Callable[[], Result], answer: Future[Result]) -> None:
        if self._is_over:
            answer.cancel()
            return
        try:
            answer.set_result(function())
        except BaseException as error:  # whatever it is: the side thread raises it, and would wait for ever without it
            answer.set_exception(error)

    def look(self) -> None:
        """Make the calls that were handed over; raise the error of finished work."""
        self._make_calls()
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft().result()

    def _make_calls(self) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except Empty:
                return
            if call is not None:
                call()

    def settle(self) -> None:
        """Wait until no work is under way, and make its calls; raises its error."""
        while self._under_way:
            work = self._under_way.popleft()
            work.add_done_callback(lambda _: self._calls.put(None))
            while not work.done():
                if (call := self._calls.get()) is not None:
                    call()
            work.result()

    def end(self) -> None:
        """Give up the work that is under way, and cancel all calls: no inner steps follow."""
        self._is_over = True
        self._make_calls()
        self._thread.shutdown(wait=False, cancel_futures=True)
