"""The benchmark of stages: the speed of training a model in stages, and the cost of activation codecs.

The same microbatches go through the same model in one process, in `torch.distributed.pipelining` over gloo, and in
farandole's nodes, one per stage, on the same cores. The variants take turns in one run, so that other load on the
machine hits all of them alike; figures are medians. A figure counts only if the variant's losses equal one process's.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Final

import typer

from farandole.protocol.run.manifest import ModelConfig
from farandole.protocol.run.presets import num_parameters
from farandole.protocol.run.presets import preset as preset_model

from ..report.section import Grid, cell
from .report import OUT, Bench, BenchReport, Out, Write, open_bench
from .stages_codecs import MODEL as CODEC_MODEL
from .stages_codecs import CodecLoss, codec_grid, codec_losses
from .stages_task import MODEL, Task
from .stages_turns import ALONE, TORCH, Turn, Variant, VariantRates, play, rows_of, variants

# Its microbatches, of 512 tokens, take some hundreds of milliseconds on a core; those of the first model, some tens.
LARGER: Final = "10M"
CODEC_STEPS: Final = 300
SEEDS: Final = 3


@dataclass(slots=True)
class Throughput:
    """The turns with one model until now."""

    task: Task
    turns: list[tuple[Variant, Turn]] = field(default_factory=list)

    @property
    def rows(self) -> list[VariantRates]:
        """Return the rates of the variants that have had a turn."""
        return rows_of(self.turns) if self.turns else []

    @property
    def wrong(self) -> list[str]:
        """Return the variants whose losses differ from one process's."""
        return [f"{row.who}, {row.how}: loss off by {row.loss_error:.1e}" for row in self.rows if not row.is_right]

    def data(self) -> dict[str, Any]:
        """Return the figures for the report's data."""
        rows = [asdict(row) for row in self.rows]
        return {"task": asdict(self.task), "num_parameters": _num_parameters(self.task), "rows": rows}


@dataclass(slots=True)
class StagesFigures:
    """The measurements until now."""

    models: list[Throughput] = field(default_factory=list)
    losses: list[CodecLoss] = field(default_factory=list)
    codec_model: ModelConfig = CODEC_MODEL

    def report(self, setting: dict[str, Any]) -> BenchReport:
        """Return tables and data; a variant with wrong losses is a miss."""
        data = {
            "models": [model.data() for model in self.models],
            "codec_losses": [asdict(each) for each in self.losses],
        }
        return BenchReport(setting, self.grids(), data, misses=[miss for model in self.models for miss in model.wrong])

    def grids(self) -> list[Grid]:
        """Return the tables of throughput and losses, if measured."""
        grids = [throughput_grid(model.rows, model.task) for model in self.models if model.turns]
        return [*grids, codec_grid(self.losses, self.codec_model)] if self.losses else grids


def _num_parameters(task: Task) -> int:
    return num_parameters(task.check())


def throughput_grid(rows: list[VariantRates], task: Task) -> Grid:
    """Return the table of the variants."""
    peers = [row.microbatches_s for row in rows if row.who == TORCH]
    cells = [
        [
            f"{row.who}, {row.how}",
            f"{row.microbatches_s:.1f}",
            f"{row.of_one_thread:.2f}",
            f"{row.microbatches_s / max(peers):.2f}" if peers and row.who != ALONE else "",
            f"{row.bytes_per_token:,.0f}" if row.who != ALONE else "",
            cell(row.mesh_cpu_ms, "{:.1f} ms"),
            f"{row.loss_error:.0e}" if row is not rows[0] else "",
        ]
        for row in rows
    ]
    header = ["", "a second", "of 1 thread", "of the faster torch", "bytes a token", "mesh CPU", "loss off by"]
    title = (
        f"Microbatches a second: {_num_parameters(task) / 1e6:.1f} M parameters in {task.num_stages} stages, "
        f"{task.num_microbatches} microbatches of {task.model['context']} tokens a step"
    )
    return Grid(title, header, cells)


def run(
    stages: Annotated[int, typer.Option(min=2, help="Number of stages that the model is cut into.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Inner steps that are timed, a turn.")] = 4,
    preset: Annotated[
        list[str] | None, typer.Option(help="A larger model to measure after the first one; repeatable.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each variant; the median counts.")] = 3,
    codec_steps: Annotated[int, typer.Option(min=1, help="Inner steps with each activation codec.")] = CODEC_STEPS,
    seeds: Annotated[int, typer.Option(min=1, help="Repetitions with each activation codec.")] = SEEDS,
    out: Out = OUT,
    write: Write = None,
) -> None:
    """Measure how fast a model in stages learns, in one process, in torch's pipelining and here; and what codecs cost.

    Example: [cyan]farandole testnet bench stages --stages 2 --repeats 1 --codec-steps 100[/cyan]
    """
    larger = [preset_model(name) for name in ([LARGER] if preset is None else preset)]
    models = [MODEL, *({size: getattr(model, size) for size in MODEL} for model in larger)]
    tasks = [Task(num_stages=stages, steps=steps, model=model) for model in models]
    for task in tasks:
        task.check()
    choices = {"repeats": repeats, "steps timed": steps, "codecs' steps": codec_steps}
    with open_bench("stages", out, write, **choices) as bench:
        bench.publish(measure(bench, tasks, repeats, codec_steps, seeds).report(bench.setting))


def measure(
    bench: Bench,
    tasks: Sequence[Task],
    repeats: int,
    codec_steps: int,
    seeds: int,
    codec_model: ModelConfig = CODEC_MODEL,
) -> StagesFigures:
    """Measure turn by turn, and write the results after each.

    Raises `BenchError`; `ManifestError` if the task's settings do not fit together.
    """
    figures = StagesFigures([Throughput(task) for task in tasks], codec_model=codec_model)
    for model in figures.models:
        size = f"{_num_parameters(model.task) / 1e6:.1f} M"
        for repeat, variant in itertools.product(range(repeats), variants()):
            bench.say(f"{size}, turn {repeat + 1} of {repeats}: {variant.name}")
            model.turns.append((variant, play(variant, model.task, bench.log)))
            bench.write(figures.report(bench.setting))

    def show(codec: str, seed: int, step: int) -> None:
        bench.say(f"seed {seed + 1} of {seeds}: activations as {codec}, step {step} of {codec_steps}")

    for result in codec_losses(codec_steps, seeds, progress=show, model=codec_model):
        figures.losses.append(result)
        bench.write(figures.report(bench.setting))
    return figures
