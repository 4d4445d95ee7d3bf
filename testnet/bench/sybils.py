"""Effect of invented authors on honest members' run state, in simulation (`farandole.testnet.simulate.sybils`)."""

from __future__ import annotations

import math
from functools import partial
from statistics import fmean
from typing import Annotated, Final

import typer

from farandole.protocol.state.state import MAX_AUTHORS

from ..report.section import Grid
from ..simulate.sybils import FOLLOWED_SECONDS, QUOTA, WRITE_SECONDS, WRITES_AT, SybilOutcome, SybilScenario, play
from .kept_plays import play_and_keep
from .process import BenchError
from .report import OUT, BenchReport, Out, Write, open_bench

# Tables of an open run hold the same number of authors per honest one as with 1,000, so that smaller runs are full,
# too.
_FULL_AT: Final = 1_000


def scenarios(honest: int, sybils: int, writes_at: float = WRITES_AT) -> dict[str, SybilScenario]:
    """Return the scenarios, by the name of their row."""
    capacity = min(MAX_AUTHORS, honest * MAX_AUTHORS // _FULL_AT)
    return {
        "none, open run": SybilScenario(honest, 0, max_authors=capacity, writes_at=writes_at),
        "open run": SybilScenario(honest, sybils, max_authors=capacity, writes_at=writes_at),
        "invited run, without an invite": SybilScenario(honest, sybils, "uninvited", writes_at=writes_at),
        "invited run, by a member with a quota": SybilScenario(honest, sybils, "invited", writes_at=writes_at),
    }


def run(
    honest: Annotated[int, typer.Option(min=8, help="Honest members.")] = 1_000,
    sybils: Annotated[int, typer.Option(min=1, help="Invented authors.")] = 4_000,
    seeds: Annotated[int, typer.Option(min=1, help="Repetitions of each.")] = 1,
    writes_at: Annotated[
        float, typer.Option(min=10, help="Virtual second, after all have started at once, from which is measured.")
    ] = WRITES_AT,
    only: Annotated[str, typer.Option(help="Rows whose names begin with this; all without it.")] = "",
    out: Out = OUT,
    write: Write = None,
) -> None:
    """Measure what invented authors do to the run state of honest members, in simulation.

    With 200 honest members and 800 invented ones it takes three minutes on two cores; the default takes much longer.

    Examples: [cyan]farandole testnet bench sybils --only "open run"[/cyan];
    [cyan]farandole testnet bench sybils --honest 100 --sybils 400 --seeds 3[/cyan]
    """
    every = scenarios(honest, sybils, writes_at)
    chosen = {name: scenario for name, scenario in every.items() if name.startswith(only)}
    if not chosen:
        raise BenchError(f"no row begins with {only!r}; there are: {'; '.join(every)}")
    with open_bench("sybils", out, write, honest=honest, sybils=sybils, seeds=seeds, writes_at=writes_at) as bench:
        plays = [(name, partial(play, scenario, seed)) for name, scenario in chosen.items() for seed in range(seeds)]
        bench.publish(report(bench.setting, play_and_keep(bench, plays, SybilOutcome)))


def _delay(seconds: float) -> str:
    """Format a delay; an entry that had not arrived at the end of the play was late by at least the time given."""
    return f"{seconds:.1f}" if math.isfinite(seconds) else f"> {FOLLOWED_SECONDS - WRITE_SECONDS:.0f}"


def report(setting: dict[str, object], outcomes: dict[str, list[SybilOutcome]]) -> BenchReport:
    """Return the table and its data."""
    rows, data = [], {}
    for name, plays in outcomes.items():
        p50, p99, last = (max(each.delay(share) for each in plays) for share in (0.5, 0.99, 1.0))
        rows.append(
            [
                name,
                f"{min(each.kept for each in plays):.2%}",
                f"{max(each.most_invented for each in plays):,}",
                *(_delay(seconds) for seconds in (p50, p99, last)),
                f"{fmean(each.messages for each in plays):.1f}",
                f"{fmean(each.num_bytes for each in plays) / 1_000:.1f}",
            ]
        )
        data[name] = [
            {
                "kept": each.kept,
                "most_invented": each.most_invented,
                "are_equal": each.are_equal,
                "delay": {str(share): each.delay(share) for share in (0.5, 0.99, 1.0)},
                "messages": each.messages,
                "bytes": each.num_bytes,
            }
            for each in plays
        ]
    words = [
        "*Honest kept*: of all honest authors in all honest members' tables, the share that is there at the end. "
        "*Invented*: authors in the table that has most of them. *p50*, *p99*, *last*: seconds from the writing of an "
        "entry by each honest member to its arrival at each; the worst seed's. *Messages*, *kB*: sent by a member in a "
        f"second. A twentieth of the messages is lost, a tenth of the members is replaced a minute, and the quota is "
        f"{QUOTA}."
    ]
    header = ["invented authors", "honest kept", "invented", "p50", "p99", "last", "messages", "kB"]
    return BenchReport(setting, [Grid("What invented authors do to the run state", header, rows)], data, words)
