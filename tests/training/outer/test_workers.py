import threading
from collections.abc import Iterator

import pytest
import torch

from farandole.training.outer import codec
from farandole.training.outer.codec import each_piece, in_order, one_thread

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


@pytest.mark.parametrize("name", ["fp32", "int8", "topk"])
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
        return sent(replicas[0]), replicas[0].round_end.slow_weights()

    (bytes_of_one, slow_of_one), (bytes_of_many, slow_of_many) = play(1), play(4)

    assert bytes_of_one == bytes_of_many
    assert torch.equal(slow_of_one, slow_of_many)
