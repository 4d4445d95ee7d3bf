"""The cost of equal bits: inner steps with and without the run's setting ``inner.deterministic``.

Trainers, each in a process of its own with the same model and data, take turns; the others wait. A trainer's cost in a
turn is how much longer its steps take than the steps of the trainer on one thread without the setting, in the same
turn. Figures are medians.
"""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from farandole.node.store.run_file import manifest_of

from ..report.section import Grid
from .report import OUT, Bench, BenchReport, Out, Write, open_bench
from .saving import NONE, open_trainers

PLAIN: Final = "one thread"
DETERMINISTIC: Final = "one thread, deterministic"


@dataclass(slots=True)
class StepFigures:
    """The measurements until now."""

    num_parameters: int = 0
    steps: int = 0
    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Trainer -> mean seconds of an inner step, for each turn."""

    def cost(self, name: str) -> float:
        """Return the share by which a step takes longer than without the setting; negative if it is shorter."""
        pairs = zip(self.seconds[name], self.seconds[PLAIN], strict=False)
        return statistics.median(own / plain - 1 for own, plain in pairs)

    def report(self, setting: dict[str, Any]) -> BenchReport:
        """Return the table and data."""
        rows = [
            [name, f"{statistics.median(seconds):.3f}", "" if name == PLAIN else f"{self.cost(name):+.1%}"]
            for name, seconds in self.seconds.items()
        ]
        title = f"An inner step of {self.num_parameters / 1e6:.1f} M parameters, {self.steps} steps a turn"
        data = {
            "num_parameters": self.num_parameters,
            "steps": self.steps,
            "seconds": dict(self.seconds),
            "costs": {name: self.cost(name) for name in self.seconds},
        }
        return BenchReport(setting, [Grid(title, ["trainer", "step, s", "longer"], rows)], data)


def run(
    model: Annotated[str, typer.Option(help="A preset.")] = "3M",
    turns: Annotated[int, typer.Option(min=1, help="Turns of each trainer; medians count.")] = 15,
    turn_seconds: Annotated[float, typer.Option(min=0.001, help="Length of a turn, about.")] = 4.0,
    device: Annotated[str, typer.Option(help="As for farandole join.")] = "cpu",
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences an inner step.")] = 8,
    out: Out = OUT,
    write: Write = None,
) -> None:
    """Measure what the setting inner.deterministic costs an inner step.

    Examples: [cyan]farandole testnet bench deterministic[/cyan];
    [cyan]farandole testnet bench deterministic --device cuda --model 125M[/cyan]
    """
    with open_bench("deterministic", out, write, model=model, turns=turns, device=device, batch=batch_size) as bench:
        run_file = {"name": "bench", "model": model, "inner": {"batch_size": batch_size}}
        bench.publish(measure(bench, run_file, turns, turn_seconds, device).report(bench.setting))


def measure(bench: Bench, run_file: Mapping[str, Any], turns: int, turn_seconds: float, device: str) -> StepFigures:
    """Measure turn by turn. Raises `BenchError`, `ManifestError`."""
    cores = os.cpu_count() or 1
    ways = {PLAIN: (1, False), DETERMINISTIC: (1, True)}
    if device == "cpu" and cores > 1:
        ways[f"{cores} threads"] = (cores, False)
    begin = {}
    for name, (threads, is_deterministic) in ways.items():
        inner = {**run_file["inner"], "deterministic": is_deterministic}
        manifest = msgspec.to_builtins(manifest_of({**run_file, "inner": inner}, Path(), 0.0))
        begin[name] = {"manifest": manifest, "way": NONE, "device": device, "threads": threads}
    figures = StepFigures()
    with open_trainers(bench, begin) as trainers:
        figures.num_parameters, figures.steps = trainers.num_parameters, trainers.steps_in(PLAIN, turn_seconds)
        for _, name, played in trainers.play(turns, figures.steps):
            figures.seconds[name].append(played["seconds"] / figures.steps)
    return figures
