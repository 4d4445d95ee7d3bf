from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from farandole.training.outer.round_end import SideThread

from ...patience import PATIENCE


@pytest.fixture
def side_thread() -> Iterator[SideThread]:
    side_thread = SideThread()
    yield side_thread
    side_thread.end()


def test_nothing_is_called_before_the_other_thread_looks(side_thread: SideThread) -> None:
    calls: list[str] = []
    has_begun = threading.Event()

    def work() -> None:
        has_begun.set()
        side_thread.call(lambda: calls.append("side thread"))

    side_thread.do(work, is_aside=True)
    assert has_begun.wait(PATIENCE)
    calls.append("step")
    while side_thread.is_busy:
        side_thread.look()
    assert calls == ["step", "side thread"]


def test_work_that_is_not_aside_comes_after_what_was_begun_and_makes_its_calls_at_once(side_thread: SideThread) -> None:
    done: list[int] = []
    side_thread.do(lambda: done.append(threading.get_ident()), is_aside=True)
    side_thread.do(lambda: done.append(side_thread.call(threading.get_ident)), is_aside=False)
    assert len(set(done)) == 2
    assert done[1] == threading.get_ident()


def test_the_side_thread_gets_the_error_of_a_call_and_the_other_one_that_of_the_work(side_thread: SideThread) -> None:
    def fail() -> None:
        raise ValueError("no memory")

    side_thread.do(lambda: side_thread.call(fail), is_aside=True)
    with pytest.raises(ValueError, match="no memory"):
        side_thread.settle()


def test_the_end_cancels_calls_that_wait_and_those_to_come() -> None:
    side_thread = SideThread()
    has_begun, ended, cancelled = threading.Event(), threading.Event(), threading.Semaphore(0)

    def work() -> None:
        has_begun.set()
        for _ in range(2):
            try:
                side_thread.call(lambda: pytest.fail("it is called"))
            except CancelledError:
                cancelled.release()
            assert ended.wait(PATIENCE)

    side_thread.do(work, is_aside=True)
    assert has_begun.wait(PATIENCE)
    side_thread.end()
    ended.set()
    for _ in range(2):
        assert cancelled.acquire(timeout=PATIENCE)
