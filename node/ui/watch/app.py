"""The full screen of ``farandole status --watch``: a Textual application.

A thread asks the node, which blocks, and hands over what it learns. The screen is drawn from one `NodeView`, when there
is news and every second, since the screen shows the status's age.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import Event as Flag
from threading import Thread
from typing import Any, ClassVar, Final

import msgspec
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.events import Resize
from textual.widgets import Footer, Static

from farandole.protocol.wire.errors import FarandoleError

from ...base.figures import plural
from ...status.status import Event, NodeStatus
from ..headline import Headline, headline
from .panels import events_text, first_lines, links_table, node_panel, run_panel

REDRAW_INTERVAL: Final = 1.0
# Most events of the watcher itself; nodes come and go less often.
MAX_OWN_EVENTS: Final = 50
# Below this many columns the panels are stacked.
_WIDE: Final = 64

News = NodeStatus | str
"""A status, or why the node did not answer, for people."""


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


class WatchApp(App[None]):
    """The screen of one node, until the key ``q``.

    ``ask(method)`` asks the node, as `farandole.node.base.control.call` does: for its ``status`` every ``interval``
    seconds, or to ``pause`` or ``resume``. ``clock``: seconds, never backwards.
    """

    TITLE = "farandole"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("p", "rest", "Pause or resume"),
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]
    CSS = """
    Screen { background: ansi_default; color: ansi_default; overflow: hidden; }
    #headline { height: auto; max-height: 4; padding: 0 1; }
    #top { height: 3fr; min-height: 9; }
    #links { height: 1fr; min-height: 4; max-height: 16; }
    #events { height: 1fr; min-height: 4; }
    #top > Static, VerticalScroll { border-top: solid $panel-lighten-3; padding: 0 1; scrollbar-size-vertical: 1; }
    #top > Static { width: 1fr; height: 100%; }
    #links Static, #events Static { width: 100%; height: auto; }
    Footer { height: 1; }
    .-narrow #top { layout: vertical; }
    .-narrow #top > Static { width: 100%; height: 1fr; }
    """

    def __init__(self, ask: Callable[[str], Any], interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(ansi_color=True)
        self._ask = ask
        self._interval = interval
        self._clock = clock
        self._is_over = Flag()
        self._headline = Static(id="headline")
        self._run, self._node = Static(id="run"), Static(id="node")
        self._links, self._events = Static(), Static()
        self._links_part = VerticalScroll(self._links, id="links")
        self._events_part = VerticalScroll(self._events, id="events")
        self.view = NodeView(read_at=clock())
        """The state that is shown."""

    def compose(self) -> ComposeResult:
        """Yield the widgets from top to bottom."""
        self._run.border_title, self._node.border_title = "the run", "this node"
        self._links_part.border_title, self._events_part.border_title = "links", "what happened"
        yield self._headline
        yield Horizontal(self._run, self._node, id="top")
        yield self._links_part
        yield self._events_part
        yield Footer()

    def on_mount(self) -> None:
        """Begin to follow the node."""
        self.set_interval(REDRAW_INTERVAL, self._draw_all)
        self._draw_all()
        Thread(target=self._follow, daemon=True).start()  # a read that blocks ends with the program

    def on_unmount(self) -> None:
        """Stop following the node."""
        self._is_over.set()

    def on_resize(self, event: Resize) -> None:
        """Draw in the new size."""
        self.set_class(event.size.width < _WIDE, "-narrow")
        self.call_after_refresh(self._draw_all)

    async def action_rest(self) -> None:
        """Pause or resume the node."""
        status = self.view.status
        if status is None:
            return
        action = "resume" if status.phase == "paused" else "pause"
        try:
            self.notify(str(await asyncio.to_thread(self._ask, action)), markup=False)
        except FarandoleError as error:
            self.notify(str(error), severity="error", markup=False)

    def _follow(self) -> None:
        def take(news: News) -> None:
            self.view = self.view.told(news, self._clock())
            self._draw_all()

        while not self._is_over.is_set():
            try:
                news: News = msgspec.convert(self._ask("status"), NodeStatus)
            except (FarandoleError, msgspec.MsgspecError) as error:
                news = str(error)
            if not self._is_over.is_set():
                self.call_later(take, news)
            self._is_over.wait(self._interval)

    def _draw_all(self) -> None:
        now, view = self._clock(), self.view
        self._headline.update(first_lines(view.headline(now)))
        if (status := view.status) is not None:
            at = view.node_time(now)
            self._run.update(run_panel(status, at, *self._run.content_size))
            self._node.update(node_panel(status, at, *self._node.content_size))
            self._run.border_title = f"{status.run.name or 'the run'} {status.run.run_id[:8]}".strip()
            self._node.border_title = f"this node {status.peer_id[-8:]}"
            self._links_part.border_title = f"links: {plural(status.connected_peers, 'peer')} connected"
            self._links.update(links_table(status, at, self._links_part.scrollable_content_region.width))
        was_at_end = self._events_part.is_vertical_scroll_end
        self._events.update(events_text(view.events()))
        if was_at_end:
            self._events_part.scroll_end(animate=False)
