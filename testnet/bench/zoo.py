"""The cost of hostile members to a run of real daemons: every hostile scenario, compared with the honest alone.

The scenarios share their run, so the honest alone are played once. Exit code and section do not depend on the verdicts:
the table states them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
import typer

from ..play.scenario import load_scenario, scenario_names
from ..zoo.member_attacks import check_attack
from ..zoo.play import HostileReport, grid_of, play_clean, play_hostile
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
        made: list[HostileReport] = []
        for scenario in scenarios:
            name = str(scenario.run["name"])
            made.append(play_hostile(scenario, out / "zoo" / name, bench.say, clean))
            bench.say(f"{name}: {'; '.join(made[-1].reasons) or 'unharmed'}")
        data = {report.name: msgspec.to_builtins(report) for report in made}
        bench.publish(claims_of(made), data, grids=[grid_of(made)])


def claims_of(made: Sequence[HostileReport]) -> list[Claim]:
    """Return the greatest cost to the honest members, and how many of their exchanges were not averaged in full."""
    costliest = max(made, key=lambda report: report.loss_above)
    touched = sum(report.attacked.honest_touched for report in made)
    return [
        Claim(f"loss above the honest alone, the costliest attack: {costliest.name}", f"{costliest.loss_above:+.1%}"),
        Claim("honest exchanges refused or clipped, all attacks", f"{touched}"),
    ]
