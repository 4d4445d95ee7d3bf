"""The parts of the screen: the run, this node, its links, and its events.

Colours repeat what words say, so that nothing is lost where there are none.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np
from rich.table import Table
from rich.text import Text

from ...base.figures import BYTES_PER_MBIT, duration, loss
from ...status.status import Event, NodeStatus
from ..headline import Headline, Level
from ..view import STYLES, status_rows

_WORDS: Final[dict[Level, str]] = {"well": "WELL", "busy": "WAIT", "trouble": "TROUBLE"}
_CHART_STYLE: Final = "cyan"
# The fewest lines for a useful chart.
_MIN_CHART_LINES: Final = 2
# Rows of the status that are about the run, not this node.
_OF_THE_RUN: Final = ("data", "loss", "stage", "the run")
# Below this many columns a link's verdict says more than its bandwidth does.
_MIN_LINK_WIDTH: Final = 60
_BAR: Final = "█", "░"
# A chart has eight dots a character (Unicode's braille patterns): a dot's bit, by column and by row from the top.
_BITS: Final = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_COLUMNS, _ROWS = len(_BITS), len(_BITS[0])
_EMPTY: Final = 0x2800
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
    chart = plot(status.losses, width, max(height - len(lines), _MIN_CHART_LINES))
    text = Text("".join(f"{line}\n" for line in chart), style=_CHART_STYLE)
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


def links_table(status: NodeStatus, now: float, width: int) -> Table:
    """Draw one line for each member that this node is connected to, or has exchanged with lately.

    ``now``: Unix seconds by the node's clock.
    """
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 1, 0, 0), width=width)
    is_wide = width >= _MIN_LINK_WIDTH
    table.add_column("peer", no_wrap=True, max_width=max(9, width // 3))
    table.add_column("path", no_wrap=True)
    for name in ("latency", *(("bandwidth", "last") if is_wide else ())):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", ratio=1, no_wrap=True, overflow="ellipsis")
    ended = {exchange.partner: exchange for exchange in status.recent_exchanges if exchange.partner}
    paths = {member.peer_id: member for member in status.members if member.is_connected}
    newest = sorted(ended, key=lambda peer: -ended[peer].ended_at)
    for peer in sorted(dict.fromkeys((*newest, *paths)), key=lambda peer: peer not in paths):
        bandwidth, last, verdict, style, member = "-", "-", "no exchange yet", "yellow", paths.get(peer)
        if exchange := ended.get(peer):
            last, verdict = f"{duration(now - exchange.ended_at)} ago", f"round {exchange.round} {exchange.verdict}"
            moved = exchange.bytes_sent + exchange.bytes_received
            style = "green" if exchange.verdict == "committed" else style
            if exchange.verdict == "committed" and exchange.seconds > 0:
                bandwidth = f"{moved / exchange.seconds / BYTES_PER_MBIT:.1f} Mbit/s"
        round_trip = status.round_trips.get(peer)
        table.add_row(
            Text(status.called(peer), overflow="ellipsis"),
            "-" if member is None else member.path or "-",
            "-" if round_trip is None else f"{round_trip * 1_000:.1f} ms",
            *((bandwidth, last) if is_wide else ()),
            Text(verdict, style),
        )
    if not (ended or paths):
        table.add_row("none")
    return table


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


def plot(points: Sequence[tuple[float, float]], width: int, height: int) -> list[str]:
    """Draw the points (x growing) as a curve in ``height`` lines of ``width`` characters, its extremes at the left.

    Return an empty list if there are too few points, or no room.
    """
    columns, rows = (width - LABEL_WIDTH) * _COLUMNS, height * _ROWS
    if len(points) < 2 or columns < 2 or height < 1:
        return []
    # The mean of the points in each column; empty columns are interpolated.
    xs, ys = np.array(points, dtype=float).T
    places = np.rint((xs - xs[0]) / ((xs[-1] - xs[0]) or 1.0) * (columns - 1)).astype(int)
    counts = np.bincount(places, minlength=columns)
    known = np.flatnonzero(counts)
    heights = np.interp(np.arange(columns), known, np.bincount(places, ys)[known] / counts[known])
    low, high = heights.min(), heights.max()
    dots = np.full(columns, rows - 1)
    if high > low:
        dots = np.rint((high - heights) / (high - low) * (rows - 1)).astype(int)
    cells = [[_EMPTY] * (columns // _COLUMNS) for _ in range(height)]
    for column, (before, row) in enumerate(zip([dots[0], *dots], dots, strict=False)):
        for dot in range(min(row, before), max(row, before) + 1):
            cells[dot // _ROWS][column // _COLUMNS] |= _BITS[column % _COLUMNS][dot % _ROWS]
    labels = [""] * height
    labels[-1] = loss(low)
    labels[0] = loss(high)
    return [f"{label:>{LABEL_WIDTH - 1}} {''.join(map(chr, line))}" for label, line in zip(labels, cells, strict=True)]
