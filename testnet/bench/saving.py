"""What saving costs training: the benchmark of saving.

Trainers that save in different ways, each in a process of its own with the same model and data, take turns round by
round, so that other load on the machine hits all of them alike; the others wait. The cost of a way in a round is how
much longer the round takes than the round of the trainer that saves nothing, in the same turn; figures are medians. The
difference between two consecutive rounds that save nothing shows which costs are too small to measure.
"""

from __future__ import annotations

import itertools
import math
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from farandole.node.store.run_file import manifest_of

from ..report.section import Grid, cell
from .process import greatest_of, median_of, open_workers
from .report import OUT, Bench, BenchReport, Claim, Out, Write, open_bench

# 25.7 M parameters: a checkpoint of 411 MB.
MODEL: Final[Mapping[str, int]] = {
    "num_layers": 8,
    "width": 512,
    "num_heads": 8,
    "hidden": 1_408,
    "context": 256,
    "vocabulary": 256,
}
DEFAULT_TRAINER: Final[Mapping[str, Any]] = {"device": "cpu", "threads": 1}
NONE, OURS, TORCH = "none", "behind", "torch"
WAYS: Final = {NONE: "nothing", OURS: "farandole, behind training", TORCH: "torch.save and fsync"}


@dataclass(frozen=True, slots=True)
class TimedRound:
    """One round of one trainer; or medians of several, and the maximum of the memory."""

    way: str
    turn: int
    seconds: float
    held_seconds: float
    """From the request to save until the trainer continued."""
    peak_mb: float | None
    """Peak resident memory above that before the first round."""
    write_seconds: float | None = None
    """From the request to save until the checkpoint was durable."""
    size: int = 0

    @property
    def rate(self) -> str:
        """Return the megabytes per second, from the request until the checkpoint is durable, in words."""
        return "" if self.write_seconds is None else f"{self.size / 1e6 / self.write_seconds:,.0f}"


def medians_of(rounds: Sequence[TimedRound]) -> dict[str, tuple[TimedRound, float]]:
    """Return each way's round, and the seconds that it loses to the one that saves nothing in the same turn."""
    base = {each.turn: each.seconds for each in rounds if each.way == NONE}
    found = {}
    for way in WAYS:
        own = [each for each in rounds if each.way == way and each.turn in base]
        if own:
            middle = TimedRound(
                way,
                len(own),
                statistics.median(each.seconds for each in own),
                statistics.median(each.held_seconds for each in own),
                greatest_of([each.peak_mb for each in own]),
                median_of([each.write_seconds for each in own]),
                max(each.size for each in own),
            )
            found[way] = middle, statistics.median(each.seconds - base[each.turn] for each in own)
    return found


def chance_share(rounds: Sequence[TimedRound]) -> float | None:
    """Return the median difference between two consecutive rounds that save nothing, as a share of a round.

    Returns None if there are fewer than two rounds. A cost below this share cannot be measured here.
    """
    base = [each.seconds for each in rounds if each.way == NONE]
    if len(base) < 2:
        return None
    return statistics.median(abs(a - b) for a, b in itertools.pairwise(base)) / statistics.median(base)


def report(setting: dict[str, Any], rounds: Sequence[TimedRound], num_parameters: int, steps: int) -> BenchReport:
    """Return the table, claims and data of the rounds until now."""
    medians, chance, size = medians_of(rounds), chance_share(rounds), max(each.size for each in rounds) / 1e6
    shares = {way: f"{lost / medians[NONE][0].seconds:.1%}" for way, (_, lost) in medians.items()}
    rows = []
    for way, (each, lost) in medians.items():
        costs = ["", "", ""] if way == NONE else [f"{lost:.2f}", shares[way], f"{each.held_seconds:.3f}"]
        rows.append([WAYS[way], f"{each.seconds:.2f}", *costs, cell(each.peak_mb, "{:,.0f}", "?"), each.rate])
    title = f"A checkpoint of {size:,.0f} MB ({num_parameters / 1e6:.1f} M parameters) a round of {steps} inner steps"
    header = ["saves", "round, s", "lost, s", "lost", "trainer held, s", "peak, MB", "MB/s"]
    claims = []
    if OURS in medians and TORCH in medians:
        both = [medians[way][0] for way in (OURS, TORCH)]
        words = f"share of a round that a checkpoint of {size:,.0f} MB costs; theirs: torch.save and fsync"
        claims = [
            Claim(words, shares[OURS], shares[TORCH]),
            Claim("seconds that the trainer is held", *(f"{each.held_seconds:.3f}" for each in both)),
            Claim("megabytes a second until durable; ours are hashed too", *(each.rate for each in both)),
            Claim("by how much two rounds without a save differ", cell(chance, "{:.1%}")),
        ]
    data = {"num_parameters": num_parameters, "steps": steps, "rounds": [asdict(each) for each in rounds]}
    words = "" if chance is None else f"Two rounds without a save, one after the other, differ by {chance:.1%}."
    return BenchReport(setting, [Grid(title, header, rows)], data, [words], claims=claims)


def run(
    turns: Annotated[int, typer.Option(min=1, help="Rounds of each way to save; medians count.")] = 7,
    round_seconds: Annotated[float, typer.Option(min=0.001, help="Length of a round, about.")] = 20.0,
    device: Annotated[str, typer.Option(help="As for farandole join.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Torch threads of a trainer.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences an inner step.")] = 4,
    out: Out = OUT,
    write: Write = False,
) -> None:
    """Measure what a checkpoint a round costs training, and what a blocking torch.save does.

    Examples: [cyan]farandole testnet bench save[/cyan];
    [cyan]farandole testnet bench save --device cuda --batch-size 64[/cyan]
    """
    choices: dict[str, Any] = {"turns": turns, "device": device, "threads of a trainer": threads}
    with open_bench("save", out, write, **choices) as bench:
        bench.publish(measure(bench, turns, round_seconds, batch_size, {"device": device, "threads": threads}))


def measure(
    bench: Bench,
    turns: int,
    round_seconds: float,
    batch_size: int = 4,
    where: Mapping[str, Any] = DEFAULT_TRAINER,
    model: Mapping[str, int] = MODEL,
) -> BenchReport:
    """Measure turn by turn, and write the results after each; ``where`` has each trainer's device and threads.

    Raises `BenchError`, `ManifestError`.
    """
    manifest = {"name": "bench-save", "model": dict(model), "inner": {"batch_size": batch_size}}
    manifest_of(manifest, Path(), 0.0)  # raises if values do not fit together
    rounds: list[TimedRound] = []
    folder = bench.out / bench.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        with open_workers("saving trainer", WAYS, bench.log) as opened:
            trainers = dict(zip(WAYS, opened, strict=True))
            for way, trainer in trainers.items():
                begun = trainer.ask("begin", manifest=manifest, way=way, folder=str(folder / way), **where)
            trainers[NONE].ask("play", steps=1)
            seconds = float(trainers[NONE].ask("play", steps=1)["seconds"])
            steps = max(1, math.ceil(round_seconds / seconds))
            for way, trainer in trainers.items():  # memory for a snapshot, the file's first blocks: obtained once
                bench.say(f"warming up: {WAYS[way]}")
                trainer.ask("play", steps=1)
            for turn in range(turns):
                for way in list(WAYS)[:: 1 if turn % 2 == 0 else -1]:
                    bench.say(f"turn {turn + 1} of {turns}: {WAYS[way]}")
                    played = trainers[way].ask("play", steps=steps)
                    rounds.append(msgspec.convert({"way": way, "turn": turn, **played}, TimedRound))
                    made = report(bench.setting, rounds, begun["num_parameters"], steps)
                    bench.write(made)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return made
