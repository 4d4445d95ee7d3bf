"""The cost of members that have read the code: a search for the costliest contributions, in simulation.

See `farandole.testnet.zoo.optimised`. The settings are those that `run create` chooses, and those that differ most from
them of all that were measured. The search plays its own seeds; the figures are of others. The costliest of the attacks
that are known by name, played with the same seeds, stands beside it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Final

import msgspec

from farandole.protocol.planning.planning import complete
from farandole.protocol.run.manifest import InnerConfig, Manifest
from farandole.protocol.run.rules import GuardConfig

from ..methods.compare import BATCH_SIZE, MODEL
from ..report.section import Grid
from ..simulate.plays import play_all
from ..zoo.optimised import Policy, search
from ..zoo.simulation import HostileOutcome, HostileRun, play
from .members import STEPS, manifest_of
from .report import OUT, Bench, Claim, Out, Write, open_bench

# The first seed of the search, in which a policy is played twice.
SEARCH_SEED: Final = 100
SEARCH_PLAYS: Final = 2
# Generations of the search, of eight policies each; rounds of 10 inner steps; seeds of the figures.
GENERATIONS, ROUNDS, SEEDS = 4, 25, 3
# The costliest attack of `bench members`.
KNOWN: Final = "slow"
COMPARED: Final = "AdamW, bf16, NoLoCo, without overlap"
CHOSEN: Final = "as run create chooses"


@dataclass(frozen=True, slots=True)
class Case:
    """Members, and the settings of their run."""

    honest: int
    hostile: int
    settings: str

    @property
    def name(self) -> str:
        """Return the case's name in tables."""
        return f"{self.hostile} of {self.honest + self.hostile}, {self.settings}"

    def alone(self, rounds: int, seed: int) -> HostileRun:
        """Return the run of the honest members alone."""
        make = chosen_manifest if self.settings == CHOSEN else partial(manifest_of, screening=GuardConfig())
        return HostileRun(make(rounds, seed), honest=self.honest, rounds=rounds, steps=STEPS, seed=seed)


CASES: Final = tuple(Case(*sizes, settings) for sizes in ((6, 2), (12, 4)) for settings in (CHOSEN, COMPARED))


def chosen_manifest(rounds: int, seed: int) -> Manifest:
    """Return the manifest of a simulated run, with what `run create` chooses where a run file leaves it open."""
    inner = InnerConfig(warmup_steps=rounds * STEPS // 20, total_steps=rounds * STEPS, batch_size=BATCH_SIZE)
    manifest = Manifest("hostile members", MODEL, seed=seed, inner=inner)
    return complete(manifest, {"inner.warmup_steps", "inner.total_steps", "inner.batch_size"})


def run(out: Out = OUT, write: Write = False) -> None:
    """Search for what hostile members can cost a run at most, in simulation (an hour or two on two cores).

    Example: [cyan]farandole testnet bench attacker[/cyan]
    """
    choices = {"generations": GENERATIONS, "rounds": ROUNDS, "seeds": SEEDS}
    with open_bench("attacker", out, write, title="Hostile members that search", **choices) as bench:
        publish(bench, {case: measure(bench, case) for case in CASES})


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found in a case; outcomes are one for each seed."""

    policy: Policy
    alone: list[HostileOutcome]
    attacked: list[HostileOutcome]
    known: list[HostileOutcome]


def above(outcomes: Sequence[HostileOutcome], quiet: Sequence[HostileOutcome]) -> list[float]:
    """Return by how much the honest members' losses exceed those of the honest alone, as shares, by seed."""
    return [one.loss / alone.loss - 1 for one, alone in zip(outcomes, quiet, strict=True)]


def measure(bench: Bench, case: Case) -> Measured:
    """Search in a case, and play what was found."""

    def played(attacks: Sequence[str | Policy], on: Sequence[int]) -> list[list[HostileOutcome]]:
        runs = []
        for number, attack in enumerate(attacks):
            for seed in on:
                alone = case.alone(ROUNDS, seed)
                attacked = replace(alone, attack=attack, hostile=case.hostile) if attack else alone
                runs.append((number, partial(play, attacked)))
        return list(play_all(lambda text: bench.say(f"{case.name}: {text}"), runs).values())

    searched = range(SEARCH_SEED, SEARCH_SEED + SEARCH_PLAYS)
    (quiet,) = played([""], searched)

    def costs(policies: Sequence[Policy]) -> list[float]:
        found = [fmean(above(outcomes, quiet)) for outcomes in played(policies, searched)]
        bench.say(f"{case.name}: {max(found):+.1%} at most in this generation of the search")
        return found

    policy, _ = search(costs, GENERATIONS, random.Random(SEARCH_SEED))
    return Measured(policy, *played(["", policy, KNOWN], range(SEEDS)))


def publish(bench: Bench, measured: dict[Case, Measured]) -> None:
    """Publish the costs by case; the greatest is the claim."""
    header = ["case", "loss above alone", "by seed", "worst member", "hostile averaged in full", "honest in full"]
    header += [f"`{KNOWN}`", "what it sends"]
    rows = []
    for case, found in measured.items():
        shares = above(found.attacked, found.alone)
        worst = max(max(one.losses) / alone.loss - 1 for one, alone in zip(found.attacked, found.alone, strict=True))
        met = sum(one.hostile_exchanges for one in found.attacked)
        less = sum(one.hostile_clipped + one.hostile_refused for one in found.attacked)
        honest = sum(one.honest_exchanges for one in found.attacked)
        touched = sum(one.honest_clipped + one.honest_refused for one in found.attacked)
        numbers = ", ".join(f"{name} {value:+.2f}" for name, value in msgspec.to_builtins(found.policy).items())
        full = [f"{1 - less / max(met, 1):.0%}", f"{1 - touched / max(honest, 1):.1%}"]
        seeds = ", ".join(f"{each:+.1%}" for each in shares)
        known = f"{fmean(above(found.known, found.alone)):+.1%}"
        rows.append([case.name, f"{fmean(shares):+.1%}", seeds, f"{worst:+.1%}", *full, known, numbers])
    claims = [Claim(f"loss above the honest alone, {row[0]}; beside it {KNOWN}", row[1], row[6]) for row in rows]
    data = {case.name: msgspec.to_builtins(found) for case, found in measured.items()}
    bench.publish(claims, data, grids=[Grid(bench.title, header, rows)])
