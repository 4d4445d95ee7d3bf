"""The cost of faults to a run: the delivered scenarios of faults, some of them played without their faults first.

A play whose report is in the folder is not repeated: together they take hours, and resume where they were stopped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from ..play.judge import conditions_beside, conditions_of_play, judged
from ..play.launch import Testnet, play_once
from ..play.scenario import ScenarioError, load_scenario
from .report import Claim, Out, Write, open_bench

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
    claims: list[Claim] = []
    reasons: list[str] = []
    with open_bench("faults", out, write, title="Faults") as bench:
        for name, scenario in played.items():
            folder = (out / name).absolute()
            clean = play_once(Testnet(scenario.clean, folder / "clean", bench.say)) if name in BESIDE_CLEAN else None
            play = play_once(Testnet(scenario, folder / "faults", bench.say))
            play = judged(play, clean, scenario) if clean else play
            wedged = sum(node.wedged for node in play.nodes)
            verdict = f"{play.verdict} in {play.seconds / 60:.1f} min, {wedged} wedged"
            claims.append(Claim(f"`{name}`: {SCENARIOS[name]}; verdict (faults: {len(play.faults)})", verdict))
            beside = conditions_beside(play.beside, scenario) if play.beside else ()
            claims += [
                Claim(f"`{name}`: {each.what} (limit: {each.limit})", each.measured)
                for each in (*conditions_of_play(play, scenario), *beside)
            ]
            reasons += [f"{name}: {reason}" for reason in play.reasons]
        bench.publish(claims, {}, misses=reasons)
