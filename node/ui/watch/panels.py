"""The parts of the screen: the run, this node, and its events.

Colours repeat what words say, so that nothing is lost where there are none.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from rich.text import Text

from ...base.figures import chart, loss
from ...status.status import Event, NodeStatus
from ..headline import Headline, Level
from ..view import STYLES, status_rows

_WORDS: Final[dict[Level, str]] = {"well": "WELL", "busy": "WAIT", "trouble": "TROUBLE"}
_CHART_STYLE: Final = "cyan"
# The fewest lines for a useful chart.
_MIN_CHART_LINES: Final = 2
# Rows of the status that are about the run, not this node.
_OF_THE_RUN: Final = ("data", "loss", "stage", "the run")
# "12.345" and a space.
LABEL_WIDTH: Final = 7


def first_lines(found: Headline) -> Text:
    """Draw whether the node is well, and the remedy if it is not."""
    text = Text(f"{_WORDS[found.level]}  {found.text}", STYLES[found.level])
    if found.remedy:
        text.append(f"\n{found.remedy}", style="not bold default")
    return text


def run_panel(status: NodeStatus, now: float, width: int, height: int) -> Text:
    """Draw the curve of the loss, and the run as a whole. ``now``: Unix seconds by the node's clock."""
    lines = [line for row in status_rows(status, now) if row.label in _OF_THE_RUN for line in row.brief.splitlines()]
    height, losses = max(height - len(lines), _MIN_CHART_LINES), [value for _, value in status.losses]
    extremes = (loss(max(losses)), *[""] * (height - 2), loss(min(losses))) if len(losses) > 1 else ()
    drawn = zip(extremes, chart(losses, width - LABEL_WIDTH, height), strict=False)
    text = Text("".join(f"{label:>{LABEL_WIDTH - 1}} {line}\n" for label, line in drawn), style=_CHART_STYLE)
    return text.append("\n".join(lines), style="not dim default")


def node_panel(status: NodeStatus, now: float) -> Text:
    """Draw this node's activity and its use of the machine. ``now``: Unix seconds by the node's clock."""
    rows = (row for row in status_rows(status, now) if row.label not in _OF_THE_RUN)
    return Text("\n".join(row.brief for row in rows if row.brief))


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
