"""Real nodes compared with the simulation of the same run: whether daemons learn what the comparison promises.

The simulated replicas take the same inner steps in one process, screen as nodes do, and are paired at random; nobody is
ever alone. Nodes start at different times and may find no partner. Their keys, and so their batches, are others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean, stdev
from typing import Annotated, Any

import msgspec
import typer

from ..play.launch import Testnet, play_and_report
from ..play.live import LineView
from ..play.report import PlayReport
from ..play.scenario import Scenario, load_scenario
from ..report.section import Grid
from ..simulate.plays import play_all
from .process import BenchError
from .report import OUT, BenchReport, Out, Write, open_bench
from .simulate_hostile import HostileOutcome, HostileRun, play


def run(
    name: Annotated[str, typer.Option("--scenario", help="A scenario whose rounds have a number of inner steps.")] = (
        "recipe"
    ),
    plays: Annotated[int, typer.Option(min=1, help="Plays of real nodes.")] = 2,
    seeds: Annotated[int, typer.Option(min=2, help="Simulated runs.")] = 3,
    out: Out = OUT,
    write: Write = None,
) -> None:
    """Compare what real nodes learn with the simulation of the same run (25 minutes on two cores).

    Examples: [cyan]farandole testnet bench recipe[/cyan]; [cyan]farandole testnet bench recipe --plays 1[/cyan]
    """
    scenario = load_scenario(name)
    simulated = [_simulated(scenario, seed) for seed in range(seeds)]
    steps = simulated[0].rounds * simulated[0].steps
    with open_bench("recipe", out, write, scenario=name, plays=plays, seeds=seeds) as bench:
        outcomes = play_all(bench.say, [(name, partial(play, each)) for each in simulated])[name]
        view = LineView(bench.console)
        folders = [out / "recipe" / str(number) for number in range(plays)]
        reports = [play_and_report(Testnet(scenario, folder, view)) for folder in folders]
        bench.publish(report(bench.setting, steps, outcomes, reports))


def _simulated(scenario: Scenario, seed: int) -> HostileRun:
    """Return the simulation of a scenario's run; raises `BenchError` if it cannot be simulated."""
    manifest = scenario.manifest(0.0)
    rounds = manifest.rounds
    if not rounds.inner_steps or scenario.rounds % rounds.partners or scenario.fault or scenario.hostile:
        raise BenchError("this needs a scenario without faults, whose rounds have a number of inner steps")
    steps, num_rounds = rounds.inner_steps, scenario.rounds // rounds.partners
    return HostileRun(manifest, honest=scenario.nodes, rounds=num_rounds, steps=steps, slowest=steps, seed=seed)


def report(
    setting: Mapping[str, Any], steps: int, outcomes: Sequence[HostileOutcome], reports: Sequence[PlayReport]
) -> BenchReport:
    """Return the table and its data; ``steps``: inner steps of a simulated replica."""
    spread = stdev(outcome.merged for outcome in outcomes)
    expected = fmean(outcome.merged for outcome in outcomes)
    met = sum(outcome.honest_exchanges for outcome in outcomes)
    touched = sum(outcome.honest_refused + outcome.honest_clipped for outcome in outcomes)
    name = f"simulated, {len(outcomes)} seeds"
    rows = [[name, f"{expected:.3f} ± {spread:.3f}", "", str(steps), "0.0%", f"{touched / met:.1%}", ""]]
    misses = []
    for number, each in enumerate(reports, 1):
        loss = math.nan if each.loss_merged is None else each.loss_merged
        committed = sum(node.exchanges_ok for node in each.nodes)
        without = sum(node.exchanges_alone + node.exchanges_failed for node in each.nodes)
        touched = sum(node.exchanges_clipped + node.exchanges_refused for node in each.nodes)
        rows.append(
            [
                f"real nodes, play {number}",
                f"{loss:.3f}",
                f"{loss / expected - 1:+.1%}",
                str(round(fmean(node.inner_steps for node in each.nodes))),
                f"{without / max(committed + without, 1):.1%}",
                f"{touched / max(committed, 1):.1%}",
                f"{each.seconds:.0f}",
            ]
        )
        misses += [f"play {number}: {reason}" for reason in each.reasons]
    header = ["", "loss of the mean", "above simulated", "inner steps", "rounds alone", "clipped or refused", "seconds"]
    words = [
        "Loss of the mean of all replicas on held-out text, in nats a token, with its standard deviation between "
        "simulated seeds. *Inner steps*: of a node, the mean: a node that starts late misses some. *Clipped or "
        "refused*: of the committed exchanges, counted at both partners."
    ]
    data = {"simulated": msgspec.to_builtins(outcomes), "real": msgspec.to_builtins(reports)}
    return BenchReport(setting, [Grid("Real nodes beside their simulation", header, rows)], data, words, misses)
