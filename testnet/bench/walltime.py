"""Seconds a round takes on home lines, and the time to a number of steps or to a loss, in simulation.

The same members, lines and bytes a contribution for every way to average. With a file of `farandole testnet compare` it
also gives the time to a loss: each method's loss by inner step, times the seconds that a step takes with this method.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from farandole.protocol.run.codec_sizes import encoded_bytes
from farandole.testnet.methods.baselines import Method, methods

from ..report.section import Grid, cell
from ..simulate.pace import AVERAGINGS, Lines, RunPace, Timing, barrier, draw_homes, pairs
from ..simulate.plays import play_all
from .greedy import numbers
from .process import BenchError
from .report import OUT, BenchReport, Out, Write, open_bench

OVERLAPPING: Final = "pairs, overlapping"
BLOCKING: Final = "pairs, blocking"
WAYS: Final = {
    OVERLAPPING: OVERLAPPING,
    BLOCKING: BLOCKING,
    "ring": "ring all-reduce, barrier",
    "tree": "tree all-reduce, barrier",
    "gathered": "DiLoCo, gathered group, barrier",
}


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    nodes: int
    way: str

    def __str__(self) -> str:
        return f"{self.nodes} nodes, {WAYS[self.way]}"


def play(case: Case, timing: Timing, admits: Timing, seed: int) -> RunPace:
    """Simulate some rounds; ``admits`` decides which lines are members'. Equal seeds give equal results."""
    lines = Lines()
    homes = draw_homes(case.nodes, lines, admits, seed)
    if case.way in AVERAGINGS:
        return barrier(homes, lines, timing, seed, case.way)
    return pairs(homes, lines, timing, seed, overlap=case.way == OVERLAPPING)


def run(
    nodes: Annotated[str, typer.Option(help="Numbers of nodes, with commas between.")] = "8,64,250,1000",
    interval: Annotated[int, typer.Option(min=1, help="Inner steps of an average node in a round.")] = 100,
    parameters: Annotated[float, typer.Option(min=0.001, help="Millions of parameters in a contribution.")] = 30.0,
    ratio: Annotated[float, typer.Option(min=1.0, help="How many times slower the slowest node is.")] = 4.0,
    churn: Annotated[bool, typer.Option(help="Nodes leave and join as in KAD.")] = True,
    steps: Annotated[int, typer.Option(min=1, help="Inner steps for which a time is given.")] = 10_000,
    seeds: Annotated[int, typer.Option(min=1, help="Repetitions of each, with other lines and speeds.")] = 3,
    compare: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON file of `farandole testnet compare`, for times to a loss.")
    ] = None,
    out: Out = OUT,
    write: Write = None,
) -> None:
    """Measure how long a round takes on home lines, for pairs and for means over all nodes, in simulation.

    Up to 64 nodes take seconds; 1,000 nodes take many minutes.

    Examples: [cyan]farandole testnet bench time[/cyan];
    [cyan]farandole testnet bench time --nodes 8,64 --no-churn[/cyan];
    [cyan]farandole testnet bench time --nodes 8 --compare out/compare.json[/cyan]
    """
    size = encoded_bytes("int8", int(parameters * 1e6))
    timing = Timing(interval=interval, contribution_bytes=size, ratio=ratio, has_churn=churn)
    choices = {"nodes": nodes, "interval": interval, "parameters": f"{parameters:g} M", "ratio": f"{ratio:g}"}
    choices |= {"churn": "KAD" if churn else "none", "seeds": str(seeds)}
    losses = read_losses(compare) if compare else None
    with open_bench("time", out, write, **choices) as bench:
        cases = [Case(number, way) for number in numbers(nodes, "--nodes") for way in WAYS]
        plays = [(case, partial(play, case, timing, timing, seed)) for case in cases for seed in range(seeds)]
        paces = play_all(bench.say, plays)
        grids = [pace_grid(paces, steps)]
        data: dict[str, Any] = {str(case): [asdict(pace) for pace in each] for case, each in paces.items()}
        if losses is not None:
            named = {method.name: method for method in methods(losses.interval)}
            jobs = loss_jobs(losses, [named[name] for name in losses.curves if name in named], timing, parameters)
            tries = [(key, partial(play, *job, seed)) for key, job in jobs for seed in range(seeds)]
            found = play_all(bench.say, tries)
            grids.append(loss_grid(losses, found))
            data["losses"] = {f"{name}, {WAYS[way]}": [asdict(p) for p in each] for (name, way), each in found.items()}
        bench.publish(BenchReport(bench.setting, grids, data, words(timing, compare is not None)))


def words(timing: Timing, has_losses: bool) -> list[str]:
    """Return what the figures are."""
    line = Lines()
    return [
        f"Simulated. Means over seeds, with the least and greatest. Every node contributes "
        f"{timing.contribution_bytes / 1e6:.0f} MB a round, whatever averages it. Lines are log-normal around "
        f"{line.up_mbit:g} Mbit/s up and {line.down_mbit:g} down (log-deviation {line.spread:g}), without those under "
        f"{timing.least_rate * 8e-6:.1f} Mbit/s, latencies around {1_000 * line.latency:g} ms (log-deviation "
        f"{line.latency_spread:g}). Pairs are the real pairing machine, with boxed rounds. Behind a barrier all wait "
        "for the slowest node and its line. *A step*: seconds of the run for an inner step of an average node. "
        "*Alone*: rounds without an average.",
        "Not modelled: slow start, loss, other traffic of a home, newcomers' downloads. The gathered group's time is a "
        "lower bound. Line spreads are assumptions. Much of what a barrier costs here is the wait for slow machines, "
        "not communication: nodes behind it take equal numbers of steps, pairs unequal ones. The tree is a simple one "
        "(its two directions do not overlap, it begins again when a member leaves), so its figures are an upper bound."
        + (
            " Times to a loss take the curves of `farandole testnet compare` as they are: steps are of an average "
            "node, and pairs whose nodes take unequal steps are assumed to learn as equal ones. An outer step comes as "
            "late as in the comparison's method, not as late as the exchange."
            if has_losses
            else ""
        ),
    ]


def spread(values: Sequence[float], form: str) -> str:
    """Format a mean with its least and greatest."""
    mean = form.format(statistics.fmean(values))
    return f"{mean} [{form.format(min(values))}, {form.format(max(values))}]" if len(values) > 1 else mean


def pace_grid(paces: Mapping[Case, Sequence[RunPace]], steps: int) -> Grid:
    """Return a row for each case."""
    rows = []
    for case, each in paces.items():
        per_step = [pace.seconds_per_step for pace in each]
        best = statistics.fmean(pace.seconds_per_step for pace in paces[Case(case.nodes, OVERLAPPING)])
        rows.append(
            [
                str(case.nodes),
                WAYS[case.way],
                spread([pace.round_seconds for pace in each], "{:,.0f}"),
                spread(per_step, "{:.2f}"),
                spread([second * steps / 3600 for second in per_step], "{:.1f}"),
                f"{statistics.fmean(per_step) / best:.2f}",
                f"{statistics.fmean(pace.busy for pace in each):.0%}",
                f"{statistics.fmean(pace.alone for pace in each):.1%}",
            ]
        )
    header = ["nodes", "averaged by", "a round, s", "a step, s", f"{steps:,} steps, h", "times", "busy", "alone"]
    return Grid("Time on home lines", header, rows, num_left=2)


@dataclass(frozen=True)
class Losses:
    """Loss curves of a comparison: by method, the mean over seeds at each step."""

    nodes: int
    interval: int
    curves: Mapping[str, Sequence[tuple[int, float]]]

    def steps_to(self, method: str, loss: float) -> float | None:
        """Return the inner steps after which the loss is this low, linear between points; None if it never is."""
        before: tuple[int, float] | None = None
        for step, value in self.curves[method]:
            if value <= loss:
                if before is None or before[1] <= value:
                    return float(step)
                return before[0] + (step - before[0]) * (before[1] - loss) / (before[1] - value)
            before = (step, value)
        return None


def read_losses(path: Path) -> Losses:
    """Read a file of `farandole testnet compare`; raise `BenchError` if it is none, or has no curves."""
    try:
        document = json.loads(path.read_text())
        at: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for result in document["results"]:
            for step, loss in result["curve"]:
                at[result["method"]][int(step)].append(float(loss))
        settings = document["settings"]
        curves = {name: [(step, statistics.fmean(at[name][step])) for step in sorted(at[name])] for name in at}
        losses = Losses(int(settings["nodes"]), int(settings["interval"]), curves)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path} is not a file of `farandole testnet compare` with loss curves: {error!r}") from error
    if not losses.curves:
        raise BenchError(f"{path} has no loss curves: make it again with `farandole testnet compare --out {path}`")
    return losses


Job = tuple[Case, Timing, Timing]


def loss_jobs(
    losses: Losses, chosen: Sequence[Method], timing: Timing, parameters: float
) -> list[tuple[tuple[str, str], Job]]:
    """Return what to simulate for each method, and each way in which it can average; methods that do not are left out.

    A larger contribution has proportionally more time, so that the same lines are admitted.
    """
    jobs = []
    for method in chosen:
        ways = {"gradients": ["ring", "tree"], "all": [*AVERAGINGS], "none": []}.get(method.group)
        if ways is None:
            ways = [OVERLAPPING if method.late else BLOCKING]
        interval = 1 if method.group == "gradients" else method.interval
        size = method.traffic * interval * parameters * 1e6
        allowed = timing.exchange_seconds * size / timing.contribution_bytes
        own = replace(timing, interval=interval, contribution_bytes=size, exchange_seconds=min(allowed, 3_600.0))
        jobs += [((method.name, way), (Case(losses.nodes, way), own, timing)) for way in ways]
    return jobs


def loss_grid(losses: Losses, found: Mapping[tuple[str, str], Sequence[RunPace]]) -> Grid:
    """Return the hours to the best loss that every method reaches, and to each method's own best."""
    best = {name: min(loss for _, loss in losses.curves[name]) for name, _ in found}
    common = max(best.values())
    rows = []
    for (name, way), paces in found.items():
        hours = statistics.fmean(pace.seconds_per_step for pace in paces) / 3600
        to_common, to_best = (losses.steps_to(name, loss) for loss in (common, best[name]))
        assert to_common is not None
        assert to_best is not None
        row = [name, WAYS[way], f"{hours * 3600:.2f}", f"{to_common:,.0f}", f"{hours * to_common:.2f}"]
        rows.append([*row, cell(best[name], "{:.3f}"), f"{hours * to_best:.2f}"])
    header = ["method", "averaged by", "a step, s", f"steps to {common:.3f}", "hours", "best loss", "hours to it"]
    return Grid(f"Time to a loss, {losses.nodes} nodes", header, rows, num_left=2)
