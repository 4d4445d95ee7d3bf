"""What saving costs training: the benchmark of saving.

A trainer saves in different ways, in turns round by round, so that other load on the machine hits all of them alike.
The cost of a way in a round is how much longer the round takes than the round that saves nothing, in the same turn;
figures are medians. The difference between two consecutive rounds that save nothing shows which costs are too small to
measure.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Annotated, Final

import typer

from .process import ANSWER_TIMEOUT, open_workers
from .report import OUT, Claim, Out, Write, open_bench

# 25.7 M parameters: a checkpoint of 411 MB.
MODEL: Final = {
    "num_layers": 8,
    "width": 512,
    "num_heads": 8,
    "hidden": 1_408,
    "context": 256,
    "vocabulary": 256,
}
# Times the expected duration in which a slow disk must have saved.
SLOWEST: Final = 5
NONE, OURS, TORCH = "none", "behind", "torch"
WAYS: Final = {NONE: "nothing", OURS: "farandole, behind training", TORCH: "torch.save and fsync"}


Rounds = Mapping[str, Sequence[Mapping[str, float]]]
"""Way to save -> each turn's round: its ``seconds``; ``held_seconds``, from the request to save until the trainer
continued; ``write_seconds``, until the checkpoint was durable; its ``size``."""


def lost(rounds: Rounds, way: str) -> float:
    """Return the median share of a round that a way loses to the round that saves nothing in the same turn."""
    base = [each["seconds"] for each in rounds[NONE]]
    differences = [each["seconds"] - own for each, own in zip(rounds[way], base, strict=True)]
    return statistics.median(differences) / statistics.median(base)


def chance_share(rounds: Rounds) -> float:
    """Return the median difference between two consecutive rounds that save nothing, as a share of a round.

    A cost below this share cannot be measured here.
    """
    base = [each["seconds"] for each in rounds[NONE]]
    return statistics.median(abs(a - b) for a, b in itertools.pairwise(base)) / statistics.median(base)


def claims_of(rounds: Rounds) -> list[Claim]:
    """Return what saving costs, ours and torch's."""

    def both(form: str, figure: Callable[[Mapping[str, float]], float]) -> list[str]:
        return [form.format(statistics.median(map(figure, rounds[way]))) for way in (OURS, TORCH)]

    size = max(each["size"] for each in rounds[OURS]) / 1e6
    words = f"share of a round that a checkpoint of {size:,.0f} MB costs; theirs: torch.save and fsync"
    rates = both("{:,.0f}", lambda each: each["size"] / 1e6 / each["write_seconds"])
    return [
        Claim(words, *(f"{lost(rounds, way):.1%}" for way in (OURS, TORCH))),
        Claim("seconds that the trainer is held", *both("{:.3f}", lambda each: each["held_seconds"])),
        Claim("megabytes a second until durable; ours are hashed too", *rates),
        Claim("by how much two rounds without a save differ", f"{chance_share(rounds):.1%}"),
    ]


def run(
    turns: Annotated[int, typer.Option(min=2, help="Rounds of each way to save; medians count.")] = 7,
    round_seconds: Annotated[float, typer.Option(min=0.001, help="Length of a round, about.")] = 20.0,
    out: Out = OUT,
    write: Write = False,
) -> None:
    """Measure what a checkpoint a round costs training, and what a blocking torch.save does.

    Example: [cyan]farandole testnet bench save --turns 3[/cyan]
    """
    manifest = {"name": "bench-save", "model": MODEL, "inner": {"batch_size": 4}}
    with open_bench("save", out, write, title="Saving", turns=turns, device="cpu") as bench:
        bench.say(f"{turns} turns of {len(WAYS)} rounds of {round_seconds:g} s: {', '.join(WAYS.values())}")
        opened = open_workers("training", ["a trainer that saves"], bench.log)
        with TemporaryDirectory(dir=out) as place, opened as (worker,):
            folder = f"{place}/checkpoints"
            worker.put("save_in_turns", manifest=manifest, folder=folder, turns=turns, seconds=round_seconds)
            rounds: Rounds = worker.get(SLOWEST * (ANSWER_TIMEOUT + turns * len(WAYS) * round_seconds))["rounds"]
        bench.publish(claims_of(rounds), {"rounds": rounds})
