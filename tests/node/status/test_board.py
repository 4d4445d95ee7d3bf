from __future__ import annotations

from farandole.node.status.board import MAX_EVENTS, Board
from farandole.protocol.identity import short_name


def test_committed_exchanges_are_counted_by_their_path() -> None:
    board = Board(say=lambda text: None)
    for path in ("bulk", "stream", "bulk"):
        board.record_exchange(0, b"b" * 32, "committed", path=path)
    board.record_exchange(1, b"b" * 32, "failed: too slow", path="bulk")
    board.record_exchange(2, None, "alone: nobody is there")
    assert board.paths == {"bulk": 2, "stream": 1}
    assert (board.exchanges_ok, board.exchanges_failed, board.exchanges_alone) == (3, 1, 1)


def test_what_happened_is_kept_in_words_and_is_bounded() -> None:
    said: list[str] = []
    board = Board(say=said.append, clock=lambda: 1.0)
    board.say("hello")
    board.note("only for who looks")
    board.warn("the disk is full")
    assert said == ["hello", "warning: the disk is full"]
    assert [(event.text, event.is_warning) for event in board.events] == [
        ("hello", False),
        ("only for who looks", False),
        ("the disk is full", True),
    ]

    for index in range(2 * MAX_EVENTS):
        board.note(str(index))
    assert len(board.events) == MAX_EVENTS
    assert board.events[-1].text == str(2 * MAX_EVENTS - 1)


def test_why_an_exchange_failed_is_told_once() -> None:
    board = Board(say=lambda text: None)
    bob = b"b" * 32
    board.record_exchange(1, bob, "failed: refused: the norm is off")  # of which the one who refuses has warned
    board.record_exchange(2, bob, "failed: the partner aborted: refused: the norm is off")
    board.record_exchange(3, bob, "failed: the partner died")
    board.record_exchange(4, None, "alone: no peer is free")
    name = short_name(bob)
    assert [event.text for event in board.events] == [
        f"{name} refused this node's contribution: the norm is off",
        f"the exchange of round 3 with {name} failed: the partner died",
    ]
