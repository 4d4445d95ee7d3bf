import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest
import torch

from farandole.training.outer import codec
from farandole.training.outer.codec import each_piece, in_order, one_thread
from farandole.training.outer.round_end import SideThread

from ...patience import PATIENCE
from ..conftest import ALICE, BOB, MakeReplica, exchange, sent

PIECES = [slice(start, start + 10) for start in range(0, 200, 10)]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_results_come_in_order_from_several_threads() -> None:
    names, met = set[str](), threading.Barrier(3, timeout=60)

    def work(piece: slice) -> int:
        if piece.start < 30:
            met.wait()  # only three threads at once come past this
        names.add(threading.current_thread().name)
        assert torch.get_num_threads() == 1
        assert not torch.is_grad_enabled()
        return int(piece.start)

    assert list(in_order(work, PIECES)) == [piece.start for piece in PIECES]
    assert len(names) == 3
    assert torch.get_num_threads() == 3


def test_the_first_piece_that_fails_is_told() -> None:
    def work(piece: slice) -> None:
        if piece.start >= 50:
            raise ValueError(piece.start)

    with pytest.raises(ValueError, match=r"^50$"):
        each_piece(work, PIECES, torch.zeros(200))
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("name", ["fp32", "int8", "int4"])
def test_a_round_has_the_same_bits_with_any_number_of_threads(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(codec, "_SLICE", 512)

    def play(num_threads: int) -> tuple[bytearray, torch.Tensor]:
        torch.set_num_threads(num_threads)
        replicas = [make_replica(author, codec=name) for author in (ALICE, BOB)]
        for _ in range(2):
            with one_thread():  # an inner step's sums depend on the number
                for each in replicas:
                    each.learn()
            exchange(replicas[0], replicas[1])
        return sent(replicas[0]), replicas[0].round_end.outer.slow.clone()

    (bytes_of_one, slow_of_one), (bytes_of_many, slow_of_many) = play(1), play(4)

    assert bytes_of_one == bytes_of_many
    assert torch.equal(slow_of_one, slow_of_many)


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
