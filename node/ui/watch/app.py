"""The full screen of ``farandole status --watch``: a Textual application.

A thread asks the node, which blocks, and hands over what it learns. The screen is drawn when there is news and every
second, since it shows the status's age. Colours repeat what words say, so that nothing is lost where there are none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from threading import Event as Flag
from threading import Thread
from typing import Any, ClassVar, Final

import msgspec
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.events import Resize
from textual.widgets import Footer, Static

from farandole.protocol.wire.errors import FarandoleError

from ...base.figures import chart, loss, plural
from ...status.status import Event, NodeStatus
from ..headline import Headline, Level, headline
from ..view import STYLES, members_table, status_rows

REDRAW_INTERVAL: Final = 1.0
# Below this many columns the panels are stacked.
_WIDE: Final = 64
_WORDS: Final[dict[Level, str]] = {"well": "WELL", "busy": "WAIT", "trouble": "TROUBLE"}
_CHART_STYLE: Final = "cyan"
# The fewest lines for a useful chart.
_MIN_CHART_LINES: Final = 2
# Rows of the status that are about the run, not this node.
_OF_THE_RUN: Final = ("data", "loss", "stage", "the run")
# "12.345" and a space.
LABEL_WIDTH: Final = 7


def run_panel(status: NodeStatus, now: float, width: int, height: int) -> Text:
    """Draw the curve of the loss, and the run as a whole. ``now``: Unix seconds by the node's clock."""
    lines = [line for row in status_rows(status, now) if row.label in _OF_THE_RUN for line in row.brief.splitlines()]
    height, losses = max(height - len(lines), _MIN_CHART_LINES), [value for _, value in status.losses]
    extremes = (loss(max(losses)), *[""] * (height - 2), loss(min(losses))) if len(losses) > 1 else ()
    drawn = zip(extremes, chart(losses, width - LABEL_WIDTH, height), strict=False)
    text = Text("".join(f"{label:>{LABEL_WIDTH - 1}} {line}\n" for label, line in drawn), style=_CHART_STYLE)
    return text.append("\n".join(lines), style="not dim default")


def events_text(events: Sequence[Event]) -> Text:
    """Draw a line for each event, with times in the viewer's time zone."""
    lines = [
        Text.assemble(
            (time.strftime("%H:%M:%S ", time.localtime(event.at)), "dim"),
            (f"warning: {event.text}", "yellow") if event.is_warning else event.text,
        )
        for event in events
    ]
    return Text("\n").join(lines) if lines else Text("nothing yet", style="dim")


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
        self._status: NodeStatus | None = None
        self._read_at = 0.0
        self._lost = ""  # why the node does not answer; empty while it does

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
        if self._status is None:
            return
        action = "resume" if self._status.phase == "paused" else "pause"
        try:
            self.notify(str(await asyncio.to_thread(self._ask, action)), markup=False)
        except FarandoleError as error:
            self.notify(str(error), severity="error", markup=False)

    def _follow(self) -> None:
        def take(status: NodeStatus | None, lost: str) -> None:
            self._lost = lost
            if status is not None:
                self._status, self._read_at = status, self._clock()
            self._draw_all()

        while not self._is_over.is_set():
            status, lost = None, ""
            try:
                status = msgspec.convert(self._ask("status"), NodeStatus)
            except (FarandoleError, msgspec.MsgspecError) as error:
                lost = str(error)
            if not self._is_over.is_set():
                self.call_later(take, status, lost)
            self._is_over.wait(self._interval)

    def _draw_all(self) -> None:
        age, first = self._clock() - self._read_at, Headline("busy", "asking the node")
        was_at_end = self._events_part.is_vertical_scroll_end
        if (status := self._status) is not None:
            at = status.at + age  # by the node's own clock, which may be another machine's
            first = headline(status, at)
            self._run.update(run_panel(status, at, *self._run.content_size))
            of_node = [row.brief for row in status_rows(status, at) if row.label not in _OF_THE_RUN and row.brief]
            self._node.update(Text("\n".join(of_node)))
            self._run.border_title = f"{status.run.name or 'the run'} {status.run.run_id[:8]}".strip()
            self._node.border_title = f"this node {status.peer_id[-8:]}"
            self._links_part.border_title = f"links: {plural(status.connected_peers, 'peer')} connected"
            others = [member for member in status.members if not member.is_self]
            status = msgspec.structs.replace(status, members=others)
            self._links.update(members_table(status, is_narrow=self.size.width < _WIDE))
            self._events.update(events_text(status.events))
        if self._lost:
            below = "" if status is None else f"; what is below is {age:.0f} s old"
            first = Headline("trouble", f"the node does not answer{below}", self._lost)
        told = Text(f"{_WORDS[first.level]}  {first.text}", STYLES[first.level])
        self._headline.update(told.append(f"\n{first.remedy}" if first.remedy else "", style="not bold default"))
        if was_at_end:
            self._events_part.scroll_end(animate=False)
