"""Live views of a testnet: one table on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from farandole.node.base.figures import count, duration, loss, sparkline

from .process import NodeProcess
from .scenario import Scenario

LINE_INTERVAL: Final = 10.0
SPARKLINE_WIDTH: Final = 12


class LineView:
    """A view for logs and pipes: events as they occur, a summary every ten seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown_at = time.monotonic()

    def say(self, text: str) -> None:
        """Print one line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, nodes: Sequence[NodeProcess], seconds: float, scenario: Scenario) -> None:
        """Print a summary, if the last one is old enough."""
        if time.monotonic() - self._shown_at >= LINE_INTERVAL:
            self._shown_at = time.monotonic()
            self.say(f"{duration(seconds)}: {summary(nodes, scenario)}")


class TableView:
    """A view for a terminal."""

    def __init__(self, console: Console, live: Live) -> None:
        self._console = console
        self._live = live

    def say(self, text: str) -> None:
        """Print a line above the table."""
        self._console.print(text, markup=False, highlight=False)

    def show(self, nodes: Sequence[NodeProcess], seconds: float, scenario: Scenario) -> None:
        """Draw the table again."""
        title = Text(f"{duration(seconds)}: {summary(nodes, scenario)}", style="bold")
        self._live.update(Group(title, table(nodes)), refresh=True)


@contextlib.contextmanager
def open_view(console: Console) -> Iterator[LineView | TableView]:
    """Open the view that suits the console."""
    if not console.is_terminal:
        yield LineView(console)
        return
    with Live(console=console, auto_refresh=False) as live:
        yield TableView(console, live)


def summary(nodes: Sequence[NodeProcess], scenario: Scenario) -> str:
    """Return a one-line summary of all nodes."""
    running = [node for node in nodes if node.is_running]
    statuses = [node.record.status for node in running if node.record.status]
    if not statuses:
        return f"{len(running)} nodes start"
    rounds = [status.round for status in statuses]
    losses = [status.loss for status in statuses if status.loss is not None]
    course = f"loss {min(losses):.3f} to {max(losses):.3f}" if losses else "no loss yet"
    return (
        f"{len(running)} live, rounds {min(rounds)} to {max(rounds)} of {scenario.rounds}, {course}, "
        f"{sum(node.report.exchanges_ok for node in nodes) // 2} exchanges, "
        f"{count(sum(status.tokens_per_second for status in statuses))} tokens/s"
    )


def table(nodes: Sequence[NodeProcess]) -> Table:
    """Return a table with one line per node, 80 columns wide."""
    result = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    result.add_column("node")
    result.add_column("peer", style="dim", no_wrap=True)
    result.add_column("doing", no_wrap=True, min_width=10)
    for column in ("round", "steps", "tokens/s", "loss"):
        result.add_column(column, justify="right", no_wrap=True)
    result.add_column("course", no_wrap=True, min_width=SPARKLINE_WIDTH, style="cyan")
    result.add_column("ok/alone/failed", justify="right", no_wrap=True)
    result.add_column("with", justify="right")
    for node in nodes:
        result.add_row(*_row(node))
    return result


def _row(node: NodeProcess) -> list[str]:
    report, status = node.report, node.record.status
    cells = [str(report.index), report.peer_id[-8:], _doing(node)]
    if status is None:
        return cells
    losses = [value for _, value in report.losses]
    return [
        *cells,
        str(report.rounds),
        str(status.inner_steps),
        count(status.tokens_per_second) if node.is_running else "",
        loss(status.loss),
        sparkline(losses, SPARKLINE_WIDTH),
        f"{report.exchanges_ok}/{report.exchanges_alone}/{report.exchanges_failed}",
        str(len(report.partners)),
    ]


def _doing(node: NodeProcess) -> str:
    if node.report.wedged:
        return "[bold red]wedged[/]"
    if node.is_frozen:
        return "[blue]frozen[/]"
    if not node.is_running:
        return "[red]died[/]" if node.report.died else "[dim]gone[/]" if node.joined.is_set() else "[dim]not yet[/]"
    phase = node.record.status.phase if node.record.status else "starting"
    return {"training": "[green]training[/]", "finished": "[bold green]finished[/]"}.get(phase, phase)
