"""The parts of the screen: what is said of the run, of this node, of its links, and of what happened.

Colours repeat what words say, so that nothing is lost where there are none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Final

from rich.table import Table
from rich.text import Text

from ...base.figures import BYTES_PER_MBIT, count, duration, loss
from ...status.status import Event, LinkStatus, NodeStatus
from .. import phrases
from ..headline import Headline, Level
from .chart import plot

_LEVELS: Final[dict[Level, tuple[str, str]]] = {
    "well": ("WELL", "bold green"),
    "busy": ("WAIT", "bold cyan"),
    "trouble": ("TROUBLE", "bold red"),
}
_CHART_STYLE: Final = "cyan"
# The fewest that say something.
_MIN_CHART_LINES: Final = 2
# Below this many columns a link's verdict says more than its bandwidth does.
_MIN_LINK_WIDTH: Final = 60
_BAR: Final = "█", "░"


def first_lines(found: Headline) -> Text:
    """Whether the node is well, and what to do if it is not."""
    word, style = _LEVELS[found.level]
    text = Text(f"{word}  ", style=style)
    text.append(found.text)
    if found.remedy:
        text.append(f"\n{found.remedy}", style="not bold default")
    return text


def run_panel(status: NodeStatus, width: int, height: int) -> Text:
    """The curve of the loss, and the run as a whole."""
    lines = [*_run(status)]
    chart = plot(status.losses, width, max(height - len(lines), _MIN_CHART_LINES))
    text = Text("".join(f"{line}\n" for line in chart), style=_CHART_STYLE)
    return text.append("\n".join(lines), style="not dim default")


def _run(status: NodeStatus) -> Iterator[str]:
    run = status.run
    yield _losses(status)
    yield f"loss of all {loss(run.loss_mean)}; {phrases.company(run)}"
    yield f"{count(run.tokens_per_second)} tokens/s, {count(run.tokens)} tokens"
    if len(run.providers) > 1:
        yield f"live in each stage: {phrases.providers(run)}"
    if status.data is not None:
        yield phrases.epoch(status.data)


def _losses(status: NodeStatus) -> str:
    if status.loss is None:
        return f"loss {phrases.unknown_loss(status)}"
    text = f"loss {loss(status.loss)} here"
    return f"{text}, held-out {loss(status.validation[-1][1])}" if status.validation else text


def node_panel(status: NodeStatus, now: float, width: int) -> Text:
    """What this node does, and what it takes of its machine. ``now``: Unix seconds by its clock."""
    lines = [
        f"{phrases.phase(status, now)}, up {duration(now - status.started_at)}",
        _round(status, now, width),
        *_work(status),
        *_takes(status),
        _flow("up  ", status.bytes_sent_per_second, status.upload_mbit, width),
        _flow("down", status.bytes_received_per_second, status.download_mbit, width),
        f"reached {phrases.reached(status, names_relays=False)}",
    ]
    if status.waits_for:
        lines.insert(1, f"waits for {status.waits_for}")
    return Text("\n".join(lines))


def _round(status: NodeStatus, now: float, width: int) -> str:
    label = f"round {status.round}"
    if status.phase != "training":
        return label
    bounds = []  # the round ends with the first of them
    if status.round_steps:
        steps = status.inner_steps_this_round
        bounds.append((steps / status.round_steps, f"{steps} of {status.round_steps} steps"))
    if status.round_seconds:
        seconds = max(0.0, now - status.round_since)
        bounds.append((seconds / status.round_seconds, f"{seconds:.0f} of {status.round_seconds:g} s"))
    if not bounds:
        return f"{label}: {status.inner_steps_this_round} steps"
    share, detail = max(bounds)
    return f"{label} {bar(share, width - len(label) - len(detail) - 2)} {detail}"


def _work(status: NodeStatus) -> Iterator[str]:
    yield f"{count(status.tokens_per_second)} tokens/s on {status.device or 'no device yet'}"
    if share := phrases.busy_share(status):
        yield share


def _takes(status: NodeStatus) -> list[str]:
    taken = status.resources
    return [] if taken is None else [line for line in (phrases.memory(taken), phrases.gpu_memory(taken)) if line]


def _flow(name: str, bytes_per_second: float, cap_mbit: float, width: int) -> str:
    mbit = bytes_per_second / BYTES_PER_MBIT
    if not cap_mbit:
        return f"{name} {mbit:.2f} Mbit/s, no cap"
    detail = f"{mbit:.2f} of {cap_mbit:g} Mbit/s"
    return f"{name} {bar(mbit / cap_mbit, width - len(name) - len(detail) - 2)} {detail}"


def bar(share: float, width: int) -> str:
    """A bar that is full to that share; empty where there is no room."""
    width = max(width, 0)
    filled = round(min(max(share, 0.0), 1.0) * width)
    return _BAR[0] * filled + _BAR[1] * (width - filled)


def links_table(links: Sequence[LinkStatus], now: float, width: int) -> Table:
    """One line a link. ``now``: Unix seconds by the node's clock."""
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 1, 0, 0), width=width)
    is_wide = width >= _MIN_LINK_WIDTH
    table.add_column("peer", no_wrap=True)
    table.add_column("path", no_wrap=True)
    for name in ("latency", *(("bandwidth", "last") if is_wide else ())):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", ratio=1, no_wrap=True, overflow="ellipsis")
    for link in links:
        table.add_row(
            link.peer_id[-8:],
            link.path or "-",
            "-" if link.round_trip_seconds is None else f"{link.round_trip_seconds * 1_000:.1f} ms",
            *(_measured(link, now) if is_wide else ()),
            Text(_verdict(link), style="green" if link.last_verdict == "committed" else "yellow"),
        )
    if not links:
        table.add_row("none")
    return table


def _measured(link: LinkStatus, now: float) -> tuple[str, str]:
    return (
        "-" if link.bytes_per_second is None else f"{link.bytes_per_second / BYTES_PER_MBIT:.1f} Mbit/s",
        "-" if link.last_round is None else f"{duration(now - link.last_at)} ago",
    )


def _verdict(link: LinkStatus) -> str:
    if link.last_round is None:
        return "no exchange yet"
    return f"round {link.last_round} {link.last_verdict}"


def events_text(events: Sequence[Event]) -> Text:
    """What happened, a line each, by the clock of the viewer's time zone."""
    text = Text()
    for event in events:
        if text:
            text.append("\n")
        text.append(time.strftime("%H:%M:%S ", time.localtime(event.at)), style="dim")
        text.append(f"warning: {event.text}" if event.is_warning else event.text, "yellow" if event.is_warning else "")
    return text if text else Text("nothing yet", style="dim")
