"""A node watched line by line, where there is no screen: its first line whenever that changes, and its events."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Final

from ...base.interrupts import Ending
from .feed import Feed
from .view import NodeView

# Durations and counts change all the time; that is no news.
_FIGURES: Final = re.compile(r"\d")


def print_lines(
    feed: Feed, is_over: Ending, echo: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> None:
    """Print news until ``is_over`` is set, or no more can come. ``clock``: seconds, never backwards."""
    view = NodeView(read_at=clock())
    told: tuple[str, str, str] | None = None
    told_until = None
    for news in feed.news(is_over):
        now = clock()
        view = view.told(news, now)
        events = view.events()
        if told_until is not None:
            for event in events:
                if event.at > told_until:
                    stamp = time.strftime("%H:%M:%S", time.localtime(event.at))
                    echo(f"{stamp}  {'warning: ' if event.is_warning else ''}{event.text}")
        told_until = events[-1].at if events else 0.0
        found = view.headline(now)
        essence = found.level, _FIGURES.sub("", found.text), found.remedy
        if essence != told:
            told = essence
            echo(f"{found.level}: {found.text}{f'. {found.remedy}' if found.remedy else ''}")
