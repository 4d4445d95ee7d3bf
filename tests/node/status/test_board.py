from __future__ import annotations

from farandole.node.status.board import Board


def test_committed_exchanges_are_counted_by_their_path() -> None:
    board = Board(say=lambda text: None)
    for path in ("bulk", "stream", "bulk"):
        board.record_exchange(0, b"b" * 32, "committed", path=path)
    board.record_exchange(1, b"b" * 32, "failed: too slow", path="bulk")
    board.record_exchange(2, None, "alone: nobody is there")
    assert board.paths == {"bulk": 2, "stream": 1}
    assert (board.exchanges_ok, board.exchanges_failed, board.exchanges_alone) == (3, 1, 1)
