"""Calls that a side thread hands over to the thread that takes inner steps, to be made between two of them.

While a GPU takes inner steps, a side thread can compute the end of the previous round in the host's memory. Some of its
operations use what inner steps use (the weights, the module): it hands them over here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

Result = TypeVar("Result")


class BetweenSteps:
    """The calls that were handed over. Without a side thread, every call is made at once."""

    def __init__(self) -> None:
        self._calls = SimpleQueue[Callable[[], None] | None]()
        self._side_thread: int | None = None
        self._is_over = False

    def enter_side_thread(self) -> None:
        """Note that the current thread is the side thread."""
        self._side_thread = threading.get_ident()

    def call(self, function: Callable[[], Result]) -> Result:
        """Call a function between two inner steps; the side thread waits until the other one has called it in `serve`.

        Returns what it returns and raises what it raises; raises `CancelledError` after `end`.
        """
        if threading.get_ident() != self._side_thread:
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

    def serve(self) -> None:
        """Make the calls that were handed over; for the thread of the inner steps, between two of them."""
        while True:
            try:
                call = self._calls.get_nowait()
            except Empty:
                return
            if call is not None:
                call()

    def wait_for(self, work: Future[None]) -> None:
        """Serve until the side thread has done ``work``; raises its error."""
        work.add_done_callback(lambda _: self._calls.put(None))
        while not work.done():
            if (call := self._calls.get()) is not None:
                call()
        work.result()

    def end(self) -> None:
        """Cancel all calls, those to come as well: no inner steps follow."""
        self._is_over = True
        self.serve()
