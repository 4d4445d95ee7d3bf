"""Following the file of rounds, which the real handler of the log writes and rotates."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path

import msgspec

from farandole.node.status.round_log import RoundRecord
from farandole.node.ui.metrics.report import RoundTail

ROUND = RoundRecord(1_000.5, 0, 5, 640, 2.0, 4.0, 3.5, "committed", "12D3", 4_000_000, 2_000_000, 0.5, "bulk", 3)
LINE = msgspec.json.encode(ROUND)


@contextmanager
def node_at(path: Path, lines: int) -> Iterator[RotatingFileHandler]:
    """Yield what a node writes rounds with; a file is full with this many lines."""
    handler = RotatingFileHandler(path, maxBytes=(len(LINE) + 8) * lines, backupCount=1, encoding="utf-8", delay=True)
    with closing(handler):
        yield handler


def write(node: RotatingFileHandler, *rounds: int) -> None:
    for index in rounds:
        line = msgspec.json.encode(msgspec.structs.replace(ROUND, round=index)).decode()
        node.handle(logging.LogRecord("rounds", logging.INFO, "", 0, line, None, None))


def indices(tail: RoundTail) -> list[int]:
    return [record.round for record in tail.new()]


def test_each_round_comes_once_also_across_rotations(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    tail = RoundTail(path)
    assert indices(tail) == []
    with node_at(path, lines=3) as node:
        write(node, 0, 1)
        assert (indices(tail), indices(tail)) == ([0, 1], [])
        write(node, 2, 3, 4)  # the file is full after 2
        assert path.with_name("rounds.jsonl.1").exists()
        assert (indices(tail), indices(tail)) == ([2, 3, 4], [])
        write(node, 5)
        assert indices(tail) == [5]
        write(node, 6, 7)
        assert indices(tail) == [6, 7]
        assert indices(RoundTail(path)) == [3, 4, 5, 6, 7]


def test_the_older_file_is_read_once_while_there_is_no_newer_one(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.with_name("rounds.jsonl.1").write_bytes(LINE + b"\n")
    tail = RoundTail(path)
    assert (indices(tail), indices(tail)) == ([0], [])
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(ROUND, round=1)) + b"\n")
    assert (indices(tail), indices(tail)) == ([1], [])


def test_a_line_without_its_end_waits_for_it_and_a_damaged_one_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(b'{"at": 1, "rou\n' + LINE[:20])
    tail = RoundTail(path)
    assert indices(tail) == []
    with path.open("ab") as file:
        file.write(LINE[20:] + b"\n")
    assert indices(tail) == [0]
