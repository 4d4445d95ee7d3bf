"""The guard's cost to honest members in simulation: refused or clipped exchanges, and the loss of clean runs.

Each condition is simulated with the same seeds as the run without the guard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Annotated, Any, Final, get_args

import msgspec
import typer

from farandole.protocol.run.outer_rules import Codec, NoLoCoConfig
from farandole.protocol.run.screening_rules import GuardConfig, SimilarityConfig

from ..report.section import Grid
from .kept_plays import play_and_keep
from .members import STEPS, manifest_of
from .report import OUT, BenchReport, Out, Write, open_bench
from .simulate_hostile import HostileOutcome, HostileRun, play

UNGUARDED: Final = "equal speeds, without the guard"
FRAGMENTS: Final = 4
# The member that joins late does so after this share of the rounds.
JOINS_AFTER: Final = 0.25
# Age of the weights of a crowd that joins one after the other from the first rounds on, in rounds.
LAGS: Final = {"one round": 1, "three rounds": 3}


def run(
    members: Annotated[int, typer.Option(min=2, help="Members of the run.")] = 8,
    rounds: Annotated[int, typer.Option(min=4, help="Rounds of 10 inner steps.")] = 40,
    seeds: Annotated[int, typer.Option(min=1, help="Repetitions of each condition.")] = 3,
    out: Out = OUT,
    write: Write = None,
) -> None:
    """Measure how often the guard refuses or clips honest contributions, in simulation (15 minutes on two cores).

    Examples: [cyan]farandole testnet bench honest[/cyan]; [cyan]farandole testnet bench honest --seeds 1[/cyan]
    """
    with open_bench("honest", out, write, members=members, rounds=rounds, seeds=seeds) as bench:
        runs = [each for seed in range(seeds) for each in _plays(members, rounds, seed)]
        outcomes = play_and_keep(bench, [(name, partial(play, run)) for name, run in runs], HostileOutcome)
        bench.publish(report(bench.setting, outcomes))


def _plays(members: int, rounds: int, seed: int) -> Iterator[tuple[str, HostileRun]]:
    manifest = manifest_of(rounds, seed, GuardConfig())
    equal = HostileRun(manifest, honest=members, rounds=rounds, steps=STEPS, seed=seed)
    yield UNGUARDED, replace(equal, manifest=manifest_of(rounds, seed, SimilarityConfig()))
    yield "equal speeds", equal
    yield "speeds 1 to 5", replace(equal, slowest=STEPS // 5)
    yield "some away", replace(equal, are_away=True)
    yield "one joins late", replace(equal, joins_at=int(JOINS_AFTER * rounds))
    several = replace(equal, manifest=manifest_of(rounds, seed, GuardConfig(), partners=2))
    for number, these in (("", equal), ("two partners, ", several)):
        for age, lag in LAGS.items():
            crowd = replace(these, honest=2 * members, joins_at=members + lag, newcomers=members, lag=lag)
            yield f"{number}as many join at the start, their weights {age} old", crowd
    yield "two partners", several
    yield "two partners, speeds 1 to 5", replace(several, slowest=STEPS // 5)
    yield "two partners, some away", replace(several, are_away=True)
    for fragments in (1, FRAGMENTS):
        for codec in get_args(Codec):
            outer = NoLoCoConfig(codec=codec, fragments=fragments)
            name = codec if fragments == 1 else f"{codec}, {fragments} fragments"
            yield name, replace(equal, manifest=msgspec.structs.replace(manifest, outer=outer))


def report(setting: dict[str, Any], outcomes: dict[str, list[HostileOutcome]]) -> BenchReport:
    """Return the table and its data."""
    unguarded = fmean(outcome.loss for outcome in outcomes[UNGUARDED])
    rows, met, touched = [], 0, 0
    for name, each in outcomes.items():
        loss = fmean(outcome.loss for outcome in each)
        spread = max(outcome.loss for outcome in each) - min(outcome.loss for outcome in each)
        exchanges = sum(outcome.honest_exchanges for outcome in each)
        refused = sum(outcome.honest_refused for outcome in each)
        clipped = sum(outcome.honest_clipped for outcome in each)
        if name != UNGUARDED:
            met, touched = met + exchanges, touched + refused + clipped
        share = f"{(refused + clipped) / exchanges:.2%}"
        counts = [str(exchanges), str(refused), str(clipped), share]
        rows.append([name, f"{loss:.3f}", f"{spread:.3f}", f"{loss / unguarded - 1:+.1%}", *counts])
    rows.append(["all with the guard", "", "", "", str(met), "", str(touched), f"{touched / met:.2%}"])
    header = ["members", "loss", "between seeds", "compared with no guard", "exchanges", "refused", "clipped", "share"]
    data = {name: [msgspec.to_builtins(outcome) for outcome in outcomes[name]] for name in outcomes}
    words = [
        "Loss on held-out text in nats a byte, the mean over members and seeds; *between seeds*: the largest mean less "
        "the smallest. An exchange counts at both members. *Clipped*: counted in part, or for nothing. The last row's "
        "number has the refused ones in it."
    ]
    return BenchReport(setting, [Grid("What the guard costs honest members", header, rows)], data, words)
