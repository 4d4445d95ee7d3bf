from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.node.ui.watch import feed as feeds
from farandole.node.ui.watch.feed import Feed, News, print_lines

from ...statuses import NOW
from .feeds import FULL, GivenFeed, changed


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "INTERVAL", 0.01)


def test_a_home_without_a_node_says_so_and_is_asked_again(tmp_path: Path) -> None:
    is_over = threading.Event()
    news: Iterator[News] = Feed(tmp_path).news(is_over)
    for _ in range(2):
        told = next(news)
        assert isinstance(told, str)
        assert "no node runs" in told
    is_over.set()
    assert next(news, None) is None


def test_without_a_screen_it_is_told_what_happens_line_by_line() -> None:
    more = [*FULL.events, type(FULL.events[0])(NOW + 1, "the relay a was replaced by b", True)]
    feed = GivenFeed(FULL, changed(at=NOW + 2, events=more, loss=2.4), "it is gone")
    feed.queue.put(None)
    lines: list[str] = []
    print_lines(feed, threading.Event(), lines.append, clock=lambda: 0.0)

    assert lines[0].startswith("well: training with 2 others")
    assert lines[1].endswith("warning: the relay a was replaced by b")
    assert lines[2].endswith("warning: the node does not answer: it is gone")
    assert lines[3].startswith("trouble: the node does not answer")
    assert len(lines) == 4
