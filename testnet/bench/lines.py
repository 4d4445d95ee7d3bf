"""How fast contributions move between a node with several lines and a partner, over all of the lines at once.

The node is behind a home router. Each further line is another home's, with a proxy on a machine there that the node
reaches over a cable of its own. The partner is public, and its line is fast enough for all. The lower limit is what the
lines' rates allow, without any overhead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Final

import msgspec
import typer

from ..grid import Grid
from ..leash import open_leash
from ..natlab.home import Home
from ..natlab.lab import Lab, open_lab
from .process import MB, BenchWorker, open_worker, worker_command
from .report import OUT, Bench, BenchReport, Out, Write, open_bench

HOME_KIND: Final = "port-restricted"
PARTNER_MBIT: Final = 1_000.0


class LinesTurn(msgspec.Struct, frozen=True):
    """One number of lines."""

    lines: int
    strands: int
    seconds: float
    """Until both ends had everything."""
    limit_seconds: float
    """What the lines' rates allow."""


def run(
    lines: Annotated[str, typer.Option(help="Numbers of lines, the node's own included, with commas.")] = "1,2,4,8",
    size: Annotated[int, typer.Option(min=1, help="MB of each contribution.")] = 128,
    mbit: Annotated[float, typer.Option(min=1, help="Rate of each line, up and down.")] = 20.0,
    delay: Annotated[float, typer.Option(min=0, help="Milliseconds from a home to the internet, one way.")] = 25.0,
    out: Out = OUT,
    write: Write = None,
) -> None:
    """Measure a channel's two directions at once, over 1, 2, 4 and 8 lines of 20 Mbit/s.

    Example: [cyan]sudo farandole testnet bench lines --lines 1,3 --mbit 50[/cyan]
    """
    numbers = [int(each) for each in lines.split(",")]
    with open_bench("lines", out, write, size_mb=size, mbit=mbit, delay_ms=delay) as bench:
        turns = []
        for number in numbers:
            bench.say(f"{number} of {lines} lines")
            turns.append(measure(bench, number, size * MB, mbit, delay))
        bench.publish(report(bench.setting, turns))


def measure(bench: Bench, number: int, size: int, mbit: float, delay: float) -> LinesTurn:
    """Measure one number of lines, in a lab of its own. Raises `NamespaceError`, `BenchError`."""
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(open_lab(stack.enter_context(open_leash())))
        partner_home, *homes = [lab.add_home(kind) for kind in ("open", *[HOME_KIND] * number)]
        partner_home.set_rate(PARTNER_MBIT, PARTNER_MBIT)
        for home in homes:
            home.set_rate(mbit, mbit)
            home.set_delay(delay)
        urls = [stack.enter_context(_open_proxy(bench, lab, homes[0], home)) for home in homes[1:]]
        node = stack.enter_context(_open_end(bench, "node", homes[0]))
        partner = stack.enter_context(_open_end(bench, "partner", partner_home))
        ours = node.ask("open", address=homes[0].host.ip, lines=urls)
        theirs = partner.ask("open", address=partner_home.host.ip, lines=[])
        partner.ask("expect", peer=ours["peer"])
        opened = node.ask("ask", address=theirs["address"])
        partner.ask("take", peer=ours["peer"], session=opened["session"])
        for end in (node, partner):
            end.put("move", size=size)
        seconds = max(end.get()["seconds"] for end in (node, partner))
    return LinesTurn(number, opened["strands"], seconds, size * 8 / (number * mbit * MB))


@contextlib.contextmanager
def _open_end(bench: Bench, name: str, home: Home) -> Iterator[BenchWorker]:
    with open_worker(name, [*home.host.enter, *worker_command("lines_worker:LineEnd")], bench.log) as worker:
        yield worker


@contextlib.contextmanager
def _open_proxy(bench: Bench, lab: Lab, node: Home, home: Home) -> Iterator[str]:
    """Open a proxy on a host of another home, at the end of a cable from the node's; yields its URL."""
    _, ip = lab.lay_cable(node, home)
    with open_worker("proxy", [*home.host.enter, *worker_command("lines_worker:LineProxy")], bench.log) as worker:
        yield worker.ask("open", host=ip)["url"]


def report(setting: dict[str, object], turns: Sequence[LinesTurn]) -> BenchReport:
    """Return the table and its data."""
    title = f"{setting['size_mb']} MB each way at once, over lines of {setting['mbit']:g} Mbit/s"
    header = ["lines", "connections", "seconds", "the lines' limit", "of the limit", "times as fast as the first"]
    rows = [
        [
            str(turn.lines),
            str(turn.strands),
            f"{turn.seconds:.1f}",
            f"{turn.limit_seconds:.1f}",
            f"{turn.limit_seconds / turn.seconds:.2f}",
            f"{turns[0].seconds / turn.seconds:.2f}",
        ]
        for turn in turns
    ]
    misses = [f"{turn.lines} lines had {turn.strands} connections" for turn in turns if turn.strands != turn.lines]
    return BenchReport(setting, [Grid(title, header, rows)], {"turns": msgspec.to_builtins(turns)}, misses=misses)
