"""The parts of the screen: the run, this node, and its events.

Colours repeat what words say, so that nothing is lost where there are none.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from rich.text import Text

from ...base.figures import BYTES_PER_MBIT, chart, loss
from ...status.status import Event, NodeStatus
from ..headline import Headline, Level
from ..view import STYLES, status_rows

_WORDS: Final[dict[Level, str]] = {"well": "WELL", "busy": "WAIT", "trouble": "TROUBLE"}
_CHART_STYLE: Final = "cyan"
# The fewest lines for a useful chart.
_MIN_CHART_LINES: Final = 2
# Rows of the status that are about the run, not this node.
_OF_THE_RUN: Final = ("data", "loss", "stage", "the run")
_BAR: Final = "█", "░"
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


def node_panel(status: NodeStatus, now: float, width: int, height: int) -> Text:
    """Draw this node's activity and its use of the machine. ``now``: Unix seconds by the node's clock."""
    label, steps = f"round {status.round}", status.inner_steps_this_round
    bounds = []  # the round ends with the first of them
    if status.round_steps:
        bounds.append((steps / status.round_steps, f"{steps} of {status.round_steps} steps"))
    if status.round_seconds:
        seconds = max(0.0, now - status.round_since)
        bounds.append((seconds / status.round_seconds, f"{seconds:.0f} of {status.round_seconds:g} s"))
    if status.phase == "training":
        label = _with_bar(label, *max(bounds), width) if bounds else f"{label}: {steps} steps"
    lines = [
        label,
        _flow("up  ", status.bytes_sent_per_second, status.upload_mbit, width),
        _flow("down", status.bytes_received_per_second, status.download_mbit, width),
        *(row.brief for row in status_rows(status, now) if row.label not in _OF_THE_RUN and row.brief),
    ]
    return Text("\n".join(lines))


def _flow(name: str, bytes_per_second: float, cap_mbit: float, width: int) -> str:
    mbit = bytes_per_second / BYTES_PER_MBIT
    if not cap_mbit:
        return f"{name} {mbit:.2f} Mbit/s, no cap"
    return _with_bar(name, mbit / cap_mbit, f"{mbit:.2f} of {cap_mbit:g} Mbit/s", width)


def _with_bar(label: str, share: float, detail: str, width: int) -> str:
    """Return a line with a bar in its middle that is filled to ``share``; without the bar if there is no room."""
    room = max(width - len(label) - len(detail) - 2, 0)
    filled = round(min(max(share, 0.0), 1.0) * room)
    return f"{label} {_BAR[0] * filled}{_BAR[1] * (room - filled)} {detail}"


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
