from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import NamedTuple

import pytest

from farandole.training.engine.between_steps import BetweenSteps

from ...patience import PATIENCE


class Threads(NamedTuple):
    between_steps: BetweenSteps
    side: ThreadPoolExecutor


@pytest.fixture
def threads() -> Iterator[Threads]:
    between_steps = BetweenSteps()
    with ThreadPoolExecutor(1, initializer=between_steps.enter_side_thread) as side:
        yield Threads(between_steps, side)
        between_steps.end()


def test_the_other_thread_makes_the_calls_when_it_serves(threads: Threads) -> None:
    made_by: list[int] = []

    def work() -> None:
        made_by.append(threads.between_steps.call(threading.get_ident))
        made_by.append(threads.between_steps.call(threading.get_ident))

    threads.between_steps.wait_for(threads.side.submit(work))
    assert made_by == [threading.get_ident()] * 2


def hand_over(threads: Threads, function: Callable[[], None]) -> Future[None]:
    """Let the side thread hand a call over; return once it is about to."""
    has_begun = threading.Event()

    def work() -> None:
        has_begun.set()
        threads.between_steps.call(function)

    working = threads.side.submit(work)
    assert has_begun.wait(PATIENCE)
    return working


def test_nothing_is_called_before_the_other_thread_serves(threads: Threads) -> None:
    calls: list[str] = []
    working = hand_over(threads, lambda: calls.append("side thread"))
    calls.append("step")
    threads.between_steps.wait_for(working)
    assert calls == ["step", "side thread"]


def test_without_a_side_thread_a_call_is_made_at_once() -> None:
    assert BetweenSteps().call(threading.get_ident) == threading.get_ident()


def test_the_side_thread_gets_the_error(threads: Threads) -> None:
    caught: list[Exception] = []

    def fail() -> None:
        raise ValueError("no memory")

    def work() -> None:
        try:
            threads.between_steps.call(fail)
        except ValueError as error:
            caught.append(error)

    threads.between_steps.wait_for(threads.side.submit(work))
    assert [str(error) for error in caught] == ["no memory"]


def test_waiting_raises_the_error_of_the_work(threads: Threads) -> None:
    def work() -> None:
        raise ValueError("diverged")

    with pytest.raises(ValueError, match="diverged"):
        threads.between_steps.wait_for(threads.side.submit(work))


def test_the_end_cancels_calls_that_wait_and_those_to_come(threads: Threads) -> None:
    waiting = hand_over(threads, lambda: pytest.fail("it is called"))
    threads.between_steps.end()
    for future in (waiting, hand_over(threads, lambda: pytest.fail("it is called"))):
        with pytest.raises(CancelledError):
            future.result(PATIENCE)
