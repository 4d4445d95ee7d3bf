"""The cost of hostile members to a run of real daemons: every hostile scenario, compared with the honest alone.

The scenarios share their run, so the honest alone are played once. Exit code and section do not depend on the verdicts:
the table states them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
import typer

from ..play.judge import meetings
from ..play.launch import load_report
from ..play.report import PlayReport
from ..play.scenario import load_scenario, scenario_names
from ..report.section import Grid, cell
from ..zoo.member_attacks import check_attack
from ..zoo.play import play_clean, play_hostile
from .report import OUT, Claim, Out, Write, open_bench

# The scenario whose frame other attacks are played in.
FRAME: Final = "hostile-reversed"


def run(
    attacks: Annotated[str, typer.Option(help="Further attacks, as of `members`, with commas between them.")] = "",
    only: Annotated[str, typer.Option(help="Scenarios, with commas between them; all without this.")] = "",
    out: Out = OUT,
    write: Write = False,
) -> None:
    """Measure what hostile members cost a run of real daemons (20 minutes on two cores).

    Examples: [cyan]farandole testnet bench zoo[/cyan];
    [cyan]farandole testnet bench zoo --only hostile-scale --attacks nan,signs[/cyan]
    """
    names = only.split(",") if only else [name for name in scenario_names() if name.startswith("hostile-")]
    scenarios = [load_scenario(name) for name in names]
    for attack in filter(None, attacks.split(",")):
        check_attack(attack)
        frame = load_scenario(FRAME)
        assert frame.hostile is not None
        hostile = msgspec.structs.replace(frame.hostile, attack=attack)
        run = {**frame.run, "name": f"hostile-{attack}"}
        scenarios.append(msgspec.structs.replace(frame, hostile=hostile, run=run))
    with open_bench("zoo", out, write, title="Hostile members among real daemons", scenarios=len(scenarios)) as bench:
        clean = play_clean(load_scenario(FRAME), out / "zoo" / "alone", bench.say)
        made: list[PlayReport] = []
        for scenario in scenarios:
            name = str(scenario.run["name"])
            made.append(play_hostile(scenario, out / "zoo" / name, bench.say, clean))
            bench.say(f"{name}: {'; '.join(made[-1].reasons) or 'unharmed'}")
        data = {report.name: msgspec.to_builtins(report) for report in made}
        bench.publish(claims_of(made), data, grids=[grid_of(load_report(clean), made)])


def loss_above(report: PlayReport) -> float:
    """Return the share by which the honest members' loss exceeds the loss of the honest alone."""
    loss = report.beside.loss_above if report.beside is not None else None
    return float("nan") if loss is None else loss


def claims_of(made: Sequence[PlayReport]) -> list[Claim]:
    """Return the greatest cost to the honest members, and how many of their exchanges were not averaged in full."""
    costliest = max(made, key=loss_above)
    touched = sum(meetings(report)[1] for report in made)
    return [
        Claim(f"loss above the honest alone, the costliest attack: {costliest.name}", f"{loss_above(costliest):+.1%}"),
        Claim("honest exchanges refused or clipped, all attacks", f"{touched}"),
    ]


def grid_of(clean: PlayReport, made: Sequence[PlayReport]) -> Grid:
    """Return the table of plays with one honest play in common: a column for each."""
    what = ("honest exchanges", "honest touched", "hostile exchanges", "hostile touched")
    counts = zip(what, *(map(str, meetings(report)) for report in (clean, *made)), strict=True)
    rows = [
        ["loss", *(cell(report.loss_merged, "{:.3f}") for report in (clean, *made))],
        ["above alone", "", *(f"{loss_above(report):+.1%}" for report in made)],
        *map(list, counts),
        ["verdict", "", *(report.verdict for report in made)],
    ]
    names = ["the honest alone", *(report.name.removeprefix("hostile-") for report in made)]
    return Grid("What hostile members cost the honest ones", ["", *names], rows)
