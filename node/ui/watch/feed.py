"""A node that is watched: its statuses, what is known of it, and its news line by line.

The node of this machine is asked every second. Where there is no screen, the node's first line is printed whenever that
changes, and its events.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from farandole.protocol.wire.errors import FarandoleError

from ...base.control import NoNodeError, call
from ...base.interrupts import Ending
from ...status.journal import without_figures
from ...status.status import Event, NodeStatus
from ..headline import Headline, headline

INTERVAL: Final = 1.0
# A screen has no room for more members, and `farandole peers` shows all: a status of a thousand members has a megabyte.
MAX_MEMBERS: Final = 64
# Most events of the watcher itself; nodes come and go less often.
MAX_OWN_EVENTS: Final = 50


News = NodeStatus | str
"""A status, or why the node did not answer, for people."""


class Feed:
    """News of the node that runs in a home folder."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def news(self, is_over: Ending) -> Iterator[News]:
        """Yield one status a second until ``is_over`` is set. It blocks, so it runs in a thread of its own."""
        while not is_over.is_set():
            try:
                yield msgspec.convert(call(self._home, "status", max_members=MAX_MEMBERS), NodeStatus)
            except (FarandoleError, msgspec.MsgspecError) as error:
                yield str(error)
            is_over.wait(INTERVAL)

    def ask(self, action: str) -> str:
        """Make the node ``pause`` or ``resume``; return its answer. Raises `FarandoleError`."""
        return str(call(self._home, action))


def error_line(error: FarandoleError) -> str:
    """Return the line to print when the node did not answer."""
    code = "no_node" if isinstance(error, NoNodeError) else getattr(error, "code", "internal")
    return json.dumps({"error": {"code": code, "message": str(error)}})


@dataclass(frozen=True, slots=True)
class NodeView:
    """The last status of a node; ``read_at`` and each method's ``now`` are on the viewer's monotonic clock."""

    status: NodeStatus | None = None
    read_at: float = 0.0
    lost: str = ""
    """Why the node does not answer; empty while it does."""
    own_events: tuple[Event, ...] = ()
    """Events that the node cannot know: its end and its return."""

    def told(self, news: News, now: float) -> NodeView:
        """Return the view with these news."""
        if isinstance(news, str):
            view = replace(self, lost=news)
            return view if self.lost else view._noting(f"the node does not answer: {news}", now)
        view, before = replace(self, status=news, read_at=now, lost=""), self.status
        if before is not None and (before.pid, before.started_at) != (news.pid, news.started_at):
            return view._noting("the node was started anew", now, is_warning=False)
        return view._noting("the node answers again", now, is_warning=False) if self.lost else view

    def _noting(self, text: str, now: float, *, is_warning: bool = True) -> NodeView:
        event = Event(self.node_time(now), text, is_warning)
        return replace(self, own_events=(*self.own_events, event)[-MAX_OWN_EVENTS:])

    def node_time(self, now: float) -> float:
        """Return Unix seconds by the node's own clock, which may be another machine's."""
        return 0.0 if self.status is None else self.status.at + now - self.read_at

    def headline(self, now: float) -> Headline:
        """Return the first line."""
        if self.lost:
            age = "" if self.status is None else f"; what is below is {now - self.read_at:.0f} s old"
            return Headline("trouble", f"the node does not answer{age}", self.lost)
        if self.status is None:
            return Headline("busy", "asking the node")
        return headline(self.status, self.node_time(now))

    def events(self) -> list[Event]:
        """Return the events of the node and of this screen, oldest first."""
        events = [] if self.status is None else self.status.events
        return sorted([*events, *self.own_events], key=lambda event: event.at)


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
        essence = found.level, without_figures(found.text), found.remedy
        if essence != told:
            told = essence
            echo(f"{found.level}: {found.sentences}")


def has_screen() -> bool:
    """Return whether keys come from a terminal, and output goes to one."""
    return sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()  # Textual draws on the latter
