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
from dataclasses import asdict, dataclass, field
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
NONE: Final = "none"
WAYS: Final = {
    NONE: "nothing",
    "behind": "farandole, behind training",
    "in place": "farandole, training waits",
    "torch": "torch.save and fsync",
}


@dataclass(frozen=True, slots=True)
class TimedRound:
    """One round of one trainer."""

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


@dataclass(frozen=True, slots=True)
class WayCost:
    """The cost of one way of saving."""

    way: str
    round_seconds: float
    lost_seconds: float
    lost_share: float
    held_seconds: float
    peak_mb: float | None
    write_seconds: float | None
    size: int

    @property
    def rate_mb_s(self) -> float | None:
        """Return the megabytes per second, from the request until the checkpoint is durable."""
        return None if self.write_seconds is None else self.size / 1e6 / self.write_seconds


def rows_of(rounds: Sequence[TimedRound]) -> list[WayCost]:
    """Return a row for each way that shares a turn with a round that saves nothing, in the order of `WAYS`."""
    base = {each.turn: each.seconds for each in rounds if each.way == NONE}
    rows = []
    for way in WAYS:
        own = [each for each in rounds if each.way == way and each.turn in base]
        if not own:
            continue
        lost = statistics.median(each.seconds - base[each.turn] for each in own)
        rows.append(
            WayCost(
                way,
                statistics.median(each.seconds for each in own),
                lost,
                lost / statistics.median(base.values()),
                statistics.median(each.held_seconds for each in own),
                greatest_of([each.peak_mb for each in own]),
                median_of([each.write_seconds for each in own]),
                max(each.size for each in own),
            )
        )
    return rows


def chance_share(rounds: Sequence[TimedRound]) -> float | None:
    """Return the median difference between two consecutive rounds that save nothing, as a share of a round.

    Returns None if there are fewer than two rounds. A cost below this share cannot be measured here.
    """
    base = [each.seconds for each in rounds if each.way == NONE]
    if len(base) < 2:
        return None
    return statistics.median(abs(a - b) for a, b in itertools.pairwise(base)) / statistics.median(base)


@dataclass(slots=True)
class SavingFigures:
    """The measurements until now."""

    num_parameters: int = 0
    steps: int = 0
    rounds: list[TimedRound] = field(default_factory=list)

    def grid(self) -> Grid:
        """Return the table of each way's cost."""
        rows = [
            [
                WAYS[row.way],
                f"{row.round_seconds:.2f}",
                "" if row.way == NONE else f"{row.lost_seconds:.2f}",
                "" if row.way == NONE else f"{row.lost_share:.1%}",
                "" if row.way == NONE else f"{row.held_seconds:.3f}",
                cell(row.peak_mb, "{:,.0f}", "?"),
                cell(row.rate_mb_s, "{:,.0f}"),
            ]
            for row in rows_of(self.rounds)
        ]
        size = max(each.size for each in self.rounds) / 1e6
        title = (
            f"A checkpoint of {size:,.0f} MB ({self.num_parameters / 1e6:.1f} M parameters) a round of {self.steps} "
            "inner steps"
        )
        header = ["saves", "round, s", "lost, s", "lost", "trainer held, s", "peak, MB", "MB/s"]
        return Grid(title, header, rows)

    def words(self) -> str:
        """Return what the table does not show, in words."""
        chance = chance_share(self.rounds)
        return "" if chance is None else f"Two rounds without a save, one after the other, differ by {chance:.1%}."

    def report(self, setting: dict[str, Any]) -> BenchReport:
        """Return the table and data."""
        rows = [{**asdict(row), "rate_mb_s": row.rate_mb_s} for row in rows_of(self.rounds)]
        data = {**asdict(self), "rows": rows, "chance_share": chance_share(self.rounds)}
        return BenchReport(setting, [self.grid()], data, [self.words()], claims=self.claims())

    def claims(self) -> list[Claim]:
        """Return our costs beside those of a blocking `torch.save`."""
        by_way = {row.way: row for row in rows_of(self.rounds)}
        ours, theirs = by_way.get("behind"), by_way.get("torch")
        if ours is None or theirs is None:
            return []
        size = ours.size / 1e6
        return [
            Claim(
                f"share of a round that a checkpoint of {size:,.0f} MB costs; theirs: torch.save and fsync",
                *(f"{row.lost_share:.1%}" for row in (ours, theirs)),
            ),
            Claim("seconds that the trainer is held", *(f"{row.held_seconds:.3f}" for row in (ours, theirs))),
            Claim(
                "megabytes a second until durable; ours are hashed too",
                *(cell(row.rate_mb_s, "{:,.0f}") for row in (ours, theirs)),
            ),
            Claim("by how much two rounds without a save differ", cell(chance_share(self.rounds), "{:.1%}")),
        ]


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
        figures = measure(bench, turns, round_seconds, batch_size, {"device": device, "threads": threads})
        bench.publish(figures.report(bench.setting))


def measure(
    bench: Bench,
    turns: int,
    round_seconds: float,
    batch_size: int = 4,
    where: Mapping[str, Any] = DEFAULT_TRAINER,
    model: Mapping[str, int] = MODEL,
) -> SavingFigures:
    """Measure turn by turn, and write the results after each; ``where`` has each trainer's device and threads.

    Raises `BenchError`, `ManifestError`.
    """
    manifest = {"name": "bench-save", "model": dict(model), "inner": {"batch_size": batch_size}}
    manifest_of(manifest, Path(), 0.0)  # raises if values do not fit together
    figures, folder = SavingFigures(), bench.out / bench.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        with open_workers("saving trainer", WAYS, bench.log) as opened:
            trainers = dict(zip(WAYS, opened, strict=True))
            for way, trainer in trainers.items():
                begun = trainer.ask("begin", manifest=manifest, way=way, folder=str(folder / way), **where)
            figures.num_parameters = begun["num_parameters"]
            trainers[NONE].ask("play", steps=1)
            seconds = float(trainers[NONE].ask("play", steps=1)["seconds"])
            figures.steps = max(1, math.ceil(round_seconds / seconds))
            for way, trainer in trainers.items():  # memory for a snapshot, the file's first blocks: obtained once
                bench.say(f"warming up: {WAYS[way]}")
                trainer.ask("play", steps=1)
            for turn in range(turns):
                for way in list(WAYS)[:: 1 if turn % 2 == 0 else -1]:
                    bench.say(f"turn {turn + 1} of {turns}: {WAYS[way]}")
                    played = trainers[way].ask("play", steps=figures.steps)
                    figures.rounds.append(msgspec.convert({"way": way, "turn": turn, **played}, TimedRound))
                    bench.write(figures.report(bench.setting))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return figures
