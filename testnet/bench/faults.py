"""The cost of faults to a run: the delivered scenarios of faults, some of them played without their faults first.

A play whose report is in the folder is not repeated: together they take hours, and resume where they were stopped.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from ..play.judge import ideal_exchange_seconds, judged, load_report
from ..play.launch import REPORT_NAME, Testnet, play_and_report
from ..play.live import open_view
from ..play.report import PlayReport
from ..play.scenario import Scenario, ScenarioError, load_scenario
from ..report.section import Grid
from .report import Bench, BenchReport, Claim, Out, Write, open_bench

SCENARIOS: Final = {
    "starved": "two of 8 at 5 % of a processor for 60 s",
    "halves": "8 nodes in halves for 60 s",
    "bad-line": "200 ms, 5 % loss, 20/5 Mbit/s",
    "flap": "one of 8 killed and started every 2 s, 10 min",
    "chaos": "16 nodes, 28 min, 60 faults of six kinds",
    "hour": "8 nodes, an hour, four come and go",
}
BESIDE_CLEAN: Final = ("starved", "halves", "flap", "chaos")
"""Compared with the same scenarios without faults."""
HEADER: Final = ("what befalls them", "what is measured", "measured", "limit")


_COLUMNS: Final = ("scenario", "what", "measured", "limit")


def report(setting: Mapping[str, Any], rows: Sequence[Sequence[str]], reasons: Sequence[str]) -> BenchReport:
    """Return the table, data and misses; ``rows`` have `_COLUMNS`, and a scenario is named in its first row."""
    cells, before = [], ""
    for name, *rest in rows:
        cells.append(["" if name == before else f"`{name}`: {SCENARIOS[name]}", *rest])
        before = name
    grid = Grid("Faults, and what they cost", HEADER, cells, num_left=2)
    claims = [Claim(f"`{name}`: {what} (limit {limit})", measured) for name, what, measured, limit in rows]
    data = {"rows": [dict(zip(_COLUMNS, row, strict=True)) for row in rows]}
    return BenchReport(setting, [grid], data, misses=reasons, claims=claims)


def run(
    scenarios: Annotated[
        list[str] | None, typer.Argument(metavar="[SCENARIO]...", help="Which of them.", show_default="all")
    ] = None,
    out: Out = Path("out/faults"),
    write: Write = False,
) -> None:
    """Play the scenarios of faults, some also without faults to compare with, and measure what the faults cost.

    It takes three hours, and resumes where it was stopped: a play whose report is in the folder is not played again.
    Needs Linux, root, nftables, libfaketime. Scenarios: starved, halves, bad-line, flap, chaos, hour.

    Examples: [cyan]sudo .venv/bin/farandole testnet bench faults[/cyan];
    [cyan]sudo .venv/bin/farandole testnet bench faults starved halves --out /tmp/faults[/cyan]
    """
    if unknown := set(scenarios or ()) - set(SCENARIOS):
        raise ScenarioError(f"no scenario of faults: {', '.join(sorted(unknown))}; there are {', '.join(SCENARIOS)}")
    played = {name: load_scenario(name) for name in scenarios or SCENARIOS}
    rows: list[Sequence[str]] = []
    reasons: list[str] = []
    with open_bench("faults", out, write) as bench:
        for name, scenario in played.items():
            folder = out / name
            clean = _play(name, folder / "clean", bench, clean=True) if name in BESIDE_CLEAN else None
            play = _play(name, folder / "faults", bench, clean=False)
            play = judged(play, clean, scenario) if clean else play
            rows += [(name, *cells) for cells in _figures(play, scenario)]
            reasons += [f"{name}: {reason}" for reason in play.reasons]
            bench.write(report(bench.setting, rows, reasons))
        bench.publish(report(bench.setting, rows, reasons))


def _play(name: str, folder: Path, bench: Bench, *, clean: bool) -> PlayReport:
    if (folder / REPORT_NAME).exists():
        bench.tell(f"{name}: {folder / REPORT_NAME} is there already")
        return load_report(folder)
    with open_view(bench.console) as view:
        return play_and_report(Testnet(load_scenario(name, clean=clean), folder.absolute(), view))


def _figures(play: PlayReport, scenario: Scenario) -> Iterator[tuple[str, str, str]]:
    """Yield (name, measured value, limit) of everything that the scenario limits."""
    wedged = sum(node.wedged for node in play.nodes)
    verdict = f"{play.verdict} in {play.seconds / 60:.1f} min, {wedged} wedged"
    yield f"verdict (faults: {len(play.faults)})", verdict, "pass, 0"
    if play.beside is not None:
        beside = play.beside
        if scenario.min_throughput:
            yield (
                "tokens a second of the living, of clean",
                f"{beside.throughput:.1%}",
                f"{scenario.min_throughput:.1%}",
            )
        if scenario.min_throughput_of_others and beside.throughput_of_others is not None:
            least = f"{scenario.min_throughput_of_others:.1%}"
            yield "tokens a second of the others, of clean", f"{beside.throughput_of_others:.1%}", least
        if scenario.max_loss_above_clean is not None and beside.loss_above is not None:
            losses = f"{beside.loss_above:+.1%} ({beside.loss_merged or 0:.3f} -> {play.loss_merged or 0:.3f})"
            yield "held-out loss beside clean", losses, f"{scenario.max_loss_above_clean:+.1%}"
        if scenario.max_spread_over_clean is not None and beside.spread is not None:
            yield "spread of the weights, of clean", f"{beside.spread:.2f}", f"{scenario.max_spread_over_clean:g}"
    if scenario.max_heal_seconds is not None:
        healed = [fault.healed_in for fault in play.faults if fault.kind == "partition"]
        words = ", ".join("never" if seconds is None else f"{seconds:.1f} s" for seconds in healed)
        yield "one run state after healing", words, f"{scenario.max_heal_seconds:g} s"
    if scenario.max_exchange_over_ideal is not None:
        taken = [node for node in play.nodes if node.exchange_seconds]
        over = max(statistics.median(node.exchange_seconds) / ideal_exchange_seconds(scenario, node) for node in taken)
        failed = sum(node.exchanges_failed for node in play.nodes)
        yield "an exchange over the ideal (median, worst node)", f"{over:.2f}", f"{scenario.max_exchange_over_ideal:g}"
        yield "exchanges that failed for good", f"{failed}", "0"
    growths = [growth for node in play.nodes for growth in node.growths]
    if scenario.max_growth is not None and growths:
        most = f"{scenario.max_growth:+.1%}"
        trainers = [growth.trainer_memory for growth in growths if growth.trainer_memory is not None]
        yield "memory an hour, worst life", f"{max(growth.memory for growth in growths):+.2%}", most
        if trainers:
            yield "trainer's memory an hour, worst life", f"{max(trainers):+.2%}", most
        more = f"{max(growth.descriptors for growth in growths):+g}, {max(growth.tasks for growth in growths):+g}"
        yield "descriptors, tasks, worst life", more, "flat"
