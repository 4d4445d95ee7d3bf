"""The share of the honest members' rounds that greedy ones get, in simulation (`farandole.testnet.simulate.pairing`).

Greedy members act as one: they propose to every node all the time, and agree to every proposal. In some runs they then
follow through, and get more rounds than others; in some they do not, so that honest members go alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Annotated, Final

import typer

from farandole.protocol.run.manifest import RoundConfig

from ..report.section import Grid
from ..simulate.pairing import PairingScenario, simulate
from ..simulate.plays import play_all
from .report import OUT, BenchReport, Out, Write, open_bench

ROUND_SECONDS: Final = 30.0
ROUNDS: Final = RoundConfig(inner_steps=0, round_seconds=ROUND_SECONDS, exchange_seconds=30.0)
# Shares are also given for these first rounds, in which greedy members spend the turns that they saved before.
SHORT: Final = 10
START_SPREAD: Final = 5.0


@dataclass(frozen=True)
class GreedyCrowd:
    """Members of a run of which some are greedy."""

    members: int
    greedy: int
    do_follow_through: bool

    def __str__(self) -> str:
        return f"{self.greedy} greedy of {self.members}"

    @property
    def fair_share(self) -> float:
        """Return the share of an honest member's rounds that greedy ones have if partners are uniform."""
        return self.greedy / (self.members - 1)


@dataclass(frozen=True)
class Captured:
    """Shares of the honest members' rounds in one play."""

    at_first: float
    """Share of greedy members in the first `SHORT` rounds."""
    in_all: float
    """Share of greedy members in all requested rounds."""
    alone: float
    honest_pairs: float
    """Share of honest members."""


def play(crowd: GreedyCrowd, rounds: int, seed: int) -> Captured:
    """Simulate a run in which some members are greedy; equal seeds give equal results."""
    scenario = PairingScenario(
        crowd.members - crowd.greedy,
        ROUNDS,
        (rounds + 2) * ROUND_SECONDS,
        start_spread=START_SPREAD,
        num_capturing=crowd.greedy,
        do_capturing_exchange=crowd.do_follow_through,
    )
    report = simulate(scenario, seed)
    captured = sum(report.captured.values()) / report.rounds
    alone = report.alone / report.rounds
    return Captured(report.captured_share(SHORT), report.captured_share(rounds), alone, 1 - alone - captured)


def run(
    members: Annotated[str, typer.Option(help="Sizes of the run, with commas between them.")] = "16,64,250,1000",
    greedy: Annotated[str, typer.Option(help="Percent of them that are greedy, with commas between.")] = "10,20,30",
    rounds: Annotated[int, typer.Option(min=SHORT, help="Rounds of 30 seconds.")] = 28,
    seeds: Annotated[int, typer.Option(min=1, help="Repetitions of each.")] = 3,
    out: Out = OUT,
    write: Write = None,
) -> None:
    """Measure what share of the rounds greedy members get, in simulation.

    Up to 250 nodes and two seeds take a minute on two cores; 1,000 nodes take much longer.

    Examples: [cyan]farandole testnet bench greedy[/cyan];
    [cyan]farandole testnet bench greedy --members 16,64 --greedy 25 --seeds 1[/cyan]
    """
    crowds = [
        GreedyCrowd(size, max(1, round(size * percent / 100)), do_follow_through)
        for size in numbers(members, "--members")
        for percent in numbers(greedy, "--greedy")
        for do_follow_through in (True, False)
    ]
    with open_bench("greedy", out, write, members=members, greedy=greedy, rounds=rounds, seeds=seeds) as bench:
        plays = [(crowd, partial(play, crowd, rounds, seed)) for crowd in crowds for seed in range(seeds)]
        bench.publish(report(bench.setting, play_all(bench.say, plays), rounds))


def numbers(text: str, option: str) -> list[int]:
    """Whole numbers above 0, with commas between them.

    Raises `typer.BadParameter` if they are not.
    """
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{option} takes whole numbers above 0 with commas between, not {text!r}")
    return [int(part) for part in parts]


def report(setting: dict[str, object], captured: dict[GreedyCrowd, list[Captured]], rounds: int) -> BenchReport:
    """Return the table and its data."""
    rows, data = [], {}
    for crowd, plays in captured.items():
        fair = crowd.fair_share
        at_first, in_all = (fmean(share) / fair for share in zip(*((p.at_first, p.in_all) for p in plays), strict=True))
        worst = max(each.in_all for each in plays) / fair
        row = [f"{crowd.greedy} of {crowd.members}", "yes" if crowd.do_follow_through else "no", f"{fair:.1%}"]
        row += [f"{at_first:.2f}", f"{in_all:.2f}", f"{worst:.2f}"]
        row += [f"{fmean(each.alone for each in plays):.1%}", f"{fmean(each.honest_pairs for each in plays):.1%}"]
        rows.append(row)
        name = f"{crowd.greedy} of {crowd.members}, {'exchange' if crowd.do_follow_through else 'do not exchange'}"
        data[name] = [vars(each) for each in plays]
    words = [
        "*Fair share*: of an honest member's rounds, if every member is as likely as any other. The next three columns "
        f"are multiples of it: over the first {SHORT} rounds, over {rounds}, and over {rounds} in the worst seed. "
        "*Alone*, *with honest*: shares of the honest members' rounds."
    ]
    spans = [f"first {SHORT}", f"first {rounds}", "worst"]
    header = ["greedy", "do exchange", "fair share", *spans, "alone", "with honest"]
    return BenchReport(setting, [Grid("Rounds of honest members", header, rows)], data, words)
