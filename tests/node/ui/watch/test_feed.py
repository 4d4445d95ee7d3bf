from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from farandole.node.status.status import NodeStatus
from farandole.node.ui.watch import feed as feeds
from farandole.node.ui.watch.feed import HomeFeed, LinesFeed, Lost, News, NodeSeen, error_line, print_lines, read_line
from farandole.protocol.wire.errors import FarandoleError

from ...statuses import NOW
from .feeds import FULL, GivenFeed, changed


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "INTERVAL", 0.01)


def line(status: NodeStatus) -> bytes:
    return msgspec.json.encode(status) + b"\n"


def test_a_line_is_a_status_or_says_why_there_is_none() -> None:
    assert read_line(line(FULL)) == NodeSeen(FULL)
    assert read_line(error_line(FarandoleError("it is stopped")).encode()) == Lost("it is stopped")


@pytest.mark.parametrize("garbage", [b"", b"Welcome to Ubuntu\n", b"[]\n", b"{}\n", b"[" * 100_000, b"\xff\xfe\n"])
def test_what_else_comes_over_a_line_is_told(garbage: bytes) -> None:
    assert isinstance(read_line(garbage), Lost)


def test_a_file_is_followed_from_its_last_line_on(tmp_path: Path) -> None:
    file = tmp_path / "statuses"
    file.write_bytes(line(FULL) + line(changed(round=8)))
    is_over = threading.Event()
    news = LinesFeed(file).news(is_over)
    assert next(news) == NodeSeen(changed(round=8))

    with file.open("ab") as written:
        half = len(line(FULL)) // 2
        written.write(line(changed(round=9))[:half])
        written.flush()
        later: list[News] = []
        reader = threading.Thread(target=lambda: later.append(next(news)))
        reader.start()
        written.write(line(changed(round=9))[half:])
    reader.join(20)
    assert later == [NodeSeen(changed(round=9))]
    is_over.set()
    assert next(news, None) is None


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FarandoleError, match="cannot read"):
        LinesFeed(tmp_path / "nothing")


def test_a_home_without_a_node_says_so_and_is_asked_again(tmp_path: Path) -> None:
    is_over = threading.Event()
    news: Iterator[News] = HomeFeed(tmp_path).news(is_over)
    for _ in range(2):
        told = next(news)
        assert isinstance(told, Lost)
        assert "no node runs" in told.why
    is_over.set()
    assert next(news, None) is None


def test_without_a_screen_it_is_told_what_happens_line_by_line() -> None:
    more = [*FULL.events, type(FULL.events[0])(NOW + 1, "the relay a was replaced by b", True)]
    feed = GivenFeed(NodeSeen(FULL), NodeSeen(changed(at=NOW + 2, events=more, loss=2.4)), Lost("it is gone"))
    feed.queue.put(None)
    lines: list[str] = []
    print_lines(feed, threading.Event(), lines.append, clock=lambda: 0.0)

    assert lines[0].startswith("well: training with 2 others")
    assert lines[1].endswith("warning: the relay a was replaced by b")
    assert lines[2].endswith("warning: the node does not answer: it is gone")
    assert lines[3].startswith("trouble: the node does not answer")
    assert len(lines) == 4
