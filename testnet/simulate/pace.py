"""Seconds a round takes on home lines: pairs as farandole makes them, and means over all members behind a barrier.

    homes = draw_homes(64, Lines(), contribution_bytes=32e6, seed=1)
    pairs(homes, Timing(), overlap=True, seed=1).seconds_per_step

Pairs are the real pairing machine in virtual time (`farandole.testnet.simulate.pairing`), with rounds boxed in the time
in which an average member takes ``interval`` inner steps. Behind a barrier every member takes ``interval`` inner steps,
and all wait for the slowest; then their contributions are averaged over the same lines
(`farandole.testnet.simulate.lines`), and the outer step follows.

*Churn.* Members leave at the rate at which a population of this size does if its sessions are those of
`SESSION_MINUTES`; as many join. Which member leaves is random. A ring or a tree that loses a member starts again once
the others notice (`DEATH_SECONDS`); a gathered group goes on without the member, after the same time. A newcomer's
download costs no method anything here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from farandole.protocol.planning.needs import TRANSFER_SHARE
from farandole.protocol.run.manifest import RoundConfig

from .lines import Latencies, SimulatedHome, SimulatedLine, gathered_seconds, ring_seconds, tree_seconds
from .pairing import DEATH_SECONDS, OUTER_STEP_SECONDS, PairingScenario, simulate

MBIT: Final = 125_000.0
# Scale in minutes and shape of the Weibull distribution of sessions in KAD: M. Steiner, T. En-Najjary, E. W. Biersack,
# "Analyzing Peer Behavior in KAD" (Eurecom RR-07-205, 2007), as the source of the simulator PeerfactSim quotes them.
# Volunteers of computing projects may stay longer. Only the mean is used here.
SESSION_MINUTES: Final = (169.5385, 0.61511)
# A ring or tree that has started this many times in a round gives the round up; its time still counts.
MAX_STARTS: Final = 100
# A simulated run lasts this many rounds.
ROUNDS: Final = 12


@dataclass(frozen=True, slots=True)
class Lines:
    """Distributions of home lines: log-normal, independent of each other and of speed."""

    up_mbit: float = 20.0
    down_mbit: float = 100.0
    """Medians: the FCC's benchmark for broadband since 2024 (100/20), and the lines of the scenario slow-link."""
    spread: float = 0.8
    """Log-deviation of both, an assumption: 90 % of uploads lie between 5 and 75 Mbit/s."""
    latency: float = 0.05
    """Median in seconds of one message, one way, as in the scenario slow-link."""
    latency_spread: float = 0.5
    """Log-deviation, an assumption: one message in 1,000 takes 0.23 s or more."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Rounds of a run."""

    interval: float = 100
    """Inner steps between outer steps, of an average member."""
    contribution_bytes: float = 32e6
    """Of each member, whatever averages them: a quarter of 125 M parameters in int8."""
    exchange_seconds: float = 120.0
    """The most that a pair's exchange takes. Slower lines are no members, whatever averages them."""
    fastest_step: float = 0.5
    ratio: float = 4.0
    """Seconds of an inner step of the fastest member, and the slowest member's multiple of it."""
    has_churn: bool = True

    @property
    def least_rate(self) -> float:
        """Return the bytes per second each way that the run requires (`farandole.protocol.planning.needs`)."""
        return self.contribution_bytes / (TRANSFER_SHARE * self.exchange_seconds)

    def departures(self, num_nodes: int) -> float:
        """Return the number of members that leave in a second."""
        scale, shape = SESSION_MINUTES
        return num_nodes / (60 * scale * math.gamma(1 + 1 / shape)) if self.has_churn else 0.0


@dataclass(frozen=True, slots=True)
class RunPace:
    """The pace of a simulated run."""

    round_seconds: float
    seconds_per_step: float
    """Seconds of the run for each inner step of an average member."""
    busy: float
    """Share of the members' time spent in inner steps."""
    alone: float = 0.0
    """Share of rounds without a partner or a mean."""


def draw_homes(num_nodes: int, lines: Lines, timing: Timing, seed: int) -> list[SimulatedHome]:
    """Draw the members: lines that the run admits, and evenly spaced speeds in random order."""
    rng = random.Random(f"homes {seed}")
    shares = [index / max(num_nodes - 1, 1) for index in range(num_nodes)]
    rng.shuffle(shares)

    def rate(median: float) -> float:
        while (drawn := rng.lognormvariate(math.log(median * MBIT), lines.spread)) < timing.least_rate:
            pass
        return drawn

    fastest, slowest = 1 / timing.fastest_step, 1 / (timing.fastest_step * timing.ratio)
    return [
        SimulatedHome(
            SimulatedLine(rate(lines.up_mbit), rate(lines.down_mbit)), 1 / (fastest + share * (slowest - fastest))
        )
        for share in shares
    ]


def pairs(homes: Sequence[SimulatedHome], lines: Lines, timing: Timing, seed: int, *, overlap: bool) -> RunPace:
    """Simulate farandole's rounds."""
    speed = sum(1 / home.step_seconds for home in homes) / len(homes)
    box = timing.interval / speed
    seconds = (ROUNDS + 1) * (box + (0 if overlap else timing.exchange_seconds / 4))
    num_leaving = round(timing.departures(len(homes)) * seconds)
    rounds = RoundConfig(inner_steps=0, round_seconds=box, exchange_seconds=timing.exchange_seconds, overlap=overlap)
    scenario = PairingScenario(
        len(homes),
        rounds,
        seconds,
        start_spread=box / 10,
        num_deaths=num_leaving,
        num_late=num_leaving,
        homes=homes,
        contribution_bytes=timing.contribution_bytes,
        latency=(lines.latency, lines.latency_spread),
    )
    report = simulate(scenario, seed)
    per_step = report.node_seconds / report.inner_steps
    # Mean over members' speeds, so that the unit is a step of an average member.
    round_seconds = report.node_seconds / max(report.rounds, 1)
    return RunPace(round_seconds, per_step, report.utilisation, report.alone / max(report.rounds, 1))


Averaging = Callable[[Sequence[SimulatedLine], float, Latencies], float]
AVERAGINGS: Final[dict[str, Averaging]] = {
    "ring": ring_seconds,
    "tree": tree_seconds,
    "gathered": gathered_seconds,
}


def barrier(homes: Sequence[SimulatedHome], lines: Lines, timing: Timing, seed: int, averaging: str) -> RunPace:
    """Simulate rounds at whose end all members wait for the slowest, and average over all."""
    rng = np.random.default_rng(seed)
    inner = timing.interval * max(home.step_seconds for home in homes)

    def latencies(count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return rng.lognormal(math.log(lines.latency), lines.latency_spread, count)

    rate, total, num_failed = timing.departures(len(homes)), 0.0, 0
    for _ in range(ROUNDS):
        total += inner + OUTER_STEP_SECONDS
        needed = AVERAGINGS[averaging]([home.line for home in homes], timing.contribution_bytes, latencies)
        if averaging == "gathered":
            total += needed + (DEATH_SECONDS if rate and rng.exponential(1 / rate) < needed else 0.0)
            continue
        for _ in range(MAX_STARTS):
            leaves_after = rng.exponential(1 / rate) if rate else math.inf
            if leaves_after >= needed:
                total += needed
                break
            total += leaves_after + DEATH_SECONDS
        else:
            num_failed += 1
    trained = sum(timing.interval * home.step_seconds for home in homes) / len(homes)
    each = total / ROUNDS
    return RunPace(each, each / timing.interval, trained / each, num_failed / ROUNDS)
