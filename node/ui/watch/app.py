"""The full screen: a Textual application over `farandole.node.ui.watch.feed`.

A thread follows the feed, whose reads block, and hands its news over. The screen is drawn from one `NodeView`, when
news come and every second, since the screen shows the status's age.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from threading import Event, Thread
from typing import ClassVar, Final

from rich.console import RenderableType
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.events import Resize
from textual.widget import Widget
from textual.widgets import Footer, Static

from farandole.protocol.wire.errors import FarandoleError

from ...base.figures import plural
from ...status.status import NodeStatus
from .feed import Feed, News, NodeView
from .panels import events_text, first_lines, links_table, node_panel, run_panel

REDRAW_INTERVAL: Final = 1.0
# Below this many columns the panels are stacked.
_WIDE: Final = 64

Draw = Callable[[NodeStatus, float, int, int], RenderableType]


class Panel(Widget):
    """A part of the screen that is drawn to fit its size."""

    def __init__(self, draw: Draw, name: str) -> None:
        """``draw(status, now, width, height)``."""
        super().__init__(id=name)
        self._draw = draw
        self._shown: tuple[NodeStatus, float] | None = None

    def show(self, status: NodeStatus, now: float) -> None:
        """Store the status and draw it."""
        self._shown = status, now
        self.refresh()

    def render(self) -> RenderableType:
        """Draw the last status; empty before the first one."""
        if self._shown is None:
            return ""
        return self._draw(*self._shown, self.content_size.width, self.content_size.height)


class WatchApp(App[None]):
    """The screen of one node, until the key ``q``. ``clock``: seconds, never backwards."""

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
    Panel, VerticalScroll { border-top: solid $panel-lighten-3; padding: 0 1; scrollbar-size-vertical: 1; }
    #top > Panel { width: 1fr; height: 100%; }
    #links Static, #events Static { width: 100%; height: auto; }
    Footer { height: 1; }
    .-narrow #top { layout: vertical; }
    .-narrow #top > Panel { width: 100%; height: 1fr; }
    """

    def __init__(self, feed: Feed, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(ansi_color=True)
        self._feed = feed
        self._clock = clock
        self._is_over = Event()
        self._headline = Static(id="headline")
        self._run, self._node = Panel(run_panel, "run"), Panel(node_panel, "node")
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
            self.notify(await asyncio.to_thread(self._feed.ask, action), markup=False)
        except FarandoleError as error:
            self.notify(str(error), severity="error", markup=False)

    def _follow(self) -> None:
        def take(news: News) -> None:
            self.view = self.view.told(news, self._clock())
            self._draw_all()

        for news in self._feed.news(self._is_over):
            if self._is_over.is_set():
                return
            self.call_later(take, news)

    def _draw_all(self) -> None:
        now, view = self._clock(), self.view
        self._headline.update(first_lines(view.headline(now)))
        if view.status is not None:
            self._draw_status(view.status, view.node_time(now))
        was_at_end = self._events_part.is_vertical_scroll_end
        self._events.update(events_text(view.events()))
        if was_at_end:
            self._events_part.scroll_end(animate=False)

    def _draw_status(self, status: NodeStatus, now: float) -> None:
        self._run.show(status, now)
        self._node.show(status, now)
        run = status.run
        self._run.border_title = f"{run.name or 'the run'} {run.run_id[:8]}".strip()
        self._node.border_title = f"this node {status.peer_id[-8:]}"
        self._links_part.border_title = f"links: {plural(status.connected_peers, 'peer')} connected"
        width = self._links_part.scrollable_content_region.width
        self._links.update(links_table(status, now, width))
