"""The cost of hostile members to a run: every attack of `member_attacks`, in simulation, over several seeds.

Each is compared with a run of the honest members alone, with the same seed. Figures are means over seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import fmean
from typing import Annotated, Any, Final

import msgspec
import typer

from farandole.protocol.run.manifest import Manifest
from farandole.protocol.run.rules import GuardConfig, NoLoCoConfig, ScreeningRules

from ..methods.compare import MODEL, inner_of
from ..report.section import Grid
from ..simulate.plays import play_all
from ..zoo.member_attacks import ATTACKS, check_attack
from ..zoo.simulation import HostileOutcome, HostileRun, play
from .process import BenchError
from .report import OUT, Bench, Claim, Out, Write, open_bench

ALONE: Final = "the honest alone"
CLEAN: Final = "all honest"
UNEQUAL: Final = "all honest, speeds 1 to 5"
AWAY: Final = "all honest, some away"
STEPS: Final = 10
# Tokens that a liar claims: more than any member has, for a large share of the mean; or few, to pass as a slow node.
CLAIMS: Final = {"many": 10**12, "few": 1}


def run(
    attacks: Annotated[str, typer.Option(help="Names, with commas between them; all without this.")] = "",
    claims: Annotated[str, typer.Option(help="Of tokens: many, few, or both.")] = ",".join(CLAIMS),
    honest: Annotated[int, typer.Option(min=1, help="Honest members.")] = 6,
    hostile: Annotated[int, typer.Option(min=1, help="Hostile members.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of 10 inner steps.")] = 40,
    seeds: Annotated[int, typer.Option(min=1, help="Repetitions of each attack.")] = 3,
    out: Out = OUT,
    write: Write = False,
) -> None:
    """Measure what hostile members cost a run, attack by attack, in simulation (10 minutes a seed on two cores).

    Examples: [cyan]farandole testnet bench members[/cyan];
    [cyan]farandole testnet bench members --attacks reversed-10,initial --honest 5 --hostile 3 --seeds 1[/cyan]
    """
    names = attacks.split(",") if attacks else list(ATTACKS)
    for name in names:
        check_attack(name)
    if not set(claims.split(",")) <= CLAIMS.keys():
        raise BenchError(f"claims are {' and '.join(CLAIMS)}, not {claims!r}")
    tried = list(product(names, claims.split(",")))
    choices: dict[str, Any] = {"honest": honest, "hostile": hostile, "rounds": rounds, "seeds": seeds}
    total = honest + hostile
    name, title = "members", "Hostile members"
    if (honest, hostile) != (6, 2):
        name, title = f"{name}-{hostile}-of-{total}", f"{title}, {hostile} of {total}"
    with open_bench(name, out, write, title=title, **choices) as bench:
        runs: list[tuple[str, HostileRun]] = []
        for seed in range(seeds):
            manifest = manifest_of(rounds, seed, GuardConfig())
            alone = HostileRun(manifest, honest=honest, rounds=rounds, steps=STEPS, seed=seed)
            everybody = replace(alone, honest=total)
            runs += [(ALONE, alone), (CLEAN, everybody), (UNEQUAL, replace(everybody, slowest=STEPS // 5))]
            runs.append((AWAY, replace(everybody, are_away=True)))
            for attack, claim in tried:
                attacked = replace(alone, attack=attack, hostile=hostile, claimed_tokens=CLAIMS[claim])
                runs.append((f"{attack}, {claim}", attacked))
        outcomes = play_all(bench.say, [(name, partial(play, run)) for name, run in runs])
        publish(bench, tried, outcomes)


def manifest_of(rounds: int, seed: int, screening: ScreeningRules) -> Manifest:
    """Return the manifest of the simulated run."""
    inner, outer = inner_of(rounds * STEPS), NoLoCoConfig(codec="bf16")
    return Manifest("hostile members", MODEL, seed=seed, inner=inner, outer=outer, screening=screening)


def publish(bench: Bench, tried: Sequence[tuple[str, str]], outcomes: dict[str, list[HostileOutcome]]) -> None:
    """Publish a table of the attacks, with the costliest as claims.

    Losses are on held-out text in nats a byte, the mean over honest members and seeds; *worst* is the worst member's.
    *Hostile averaged*: of the exchanges with hostile members, those that counted in full; *clipped*: in part, or for
    nothing; the others were refused. *Triggered*: held-out sequences that, if they end in a backdoor's trigger, make
    honest members' models say what it wants.
    """
    alone = fmean(outcome.loss for outcome in outcomes[ALONE])
    rows = []
    for name in (ALONE, CLEAN, UNEQUAL, AWAY, *(f"{name}, {claim}" for name, claim in tried)):
        each = outcomes[name]
        loss = fmean(outcome.loss for outcome in each)
        met = sum(outcome.hostile_exchanges for outcome in each)
        clipped = sum(outcome.hostile_clipped for outcome in each)
        averaged = met - clipped - sum(outcome.hostile_refused for outcome in each)
        honest = sum(outcome.honest_exchanges for outcome in each)
        rows.append(
            [
                name,
                f"{loss:.3f}",
                f"{loss / alone - 1:+.1%}",
                f"{max(max(outcome.losses) for outcome in each):.3f}",
                f"{averaged / met:.0%}" if met else "",
                f"{clipped / met:.0%}" if met else "",
                f"{sum(outcome.honest_refused + outcome.honest_clipped for outcome in each) / honest:.1%}",
                f"{fmean(outcome.triggered for outcome in each):.0%}",
            ]
        )
    header = ["attack", "loss", "above alone", "worst", "hostile averaged", "clipped", "honest refused or clipped"]
    header.append("triggered")
    data = {name: [msgspec.to_builtins(outcome) for outcome in outcomes[name]] for name in outcomes}
    attacked = [row for row in rows if row[0] not in (ALONE, CLEAN, UNEQUAL, AWAY)]
    clean = [outcome for name in (CLEAN, UNEQUAL, AWAY) for outcome in outcomes[name]]
    touched = sum(outcome.honest_refused + outcome.honest_clipped for outcome in clean)
    costliest, noisiest = (max(attacked, key=lambda row: float(row[of].rstrip("%"))) for of in (2, 6))
    claims = [
        Claim(f"loss above the honest alone, the costliest attack: {costliest[0]}", costliest[2]),
        Claim(f"honest exchanges refused or clipped, the most of any attack: {noisiest[0]}", noisiest[6]),
        Claim(
            "honest exchanges refused or clipped without an attack",
            f"{touched / sum(outcome.honest_exchanges for outcome in clean):.2%}",
        ),
    ]
    bench.publish(claims, data, grids=[Grid("What hostile members cost", header, rows)])
