"""The benchmark of stages: the speed of training a model in stages.

The same microbatches go through the same model in one process, in `torch.distributed.pipelining` over gloo, and in
farandole's nodes, one per stage, on the same cores. The variants take turns in one run, so that other load on the
machine hits all of them alike; figures are medians. A figure counts only if the variant's losses equal one process's.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from farandole.protocol.run.models import num_parameters
from farandole.protocol.run.models import preset as preset_model

from ..report.section import Grid
from .process import ask_all, open_workers
from .report import OUT, Bench, BenchReport, Claim, Out, Write, open_bench
from .worker.stages import MODEL, WARMUP_STEPS, Task, bytes_per_token

# Its microbatches, of 512 tokens, take some hundreds of milliseconds on a core; those of the first model, some tens.
LARGER: Final = "10M"
ALONE, TORCH, OURS = "one process", "torch.distributed.pipelining", "farandole"
# Error of the mean loss of all steps, relative to one process; with fp32 variants differ only by the order of sums.
MAX_LOSS_ERROR: Final = 1e-5


@dataclass(frozen=True, slots=True)
class Turn:
    """The result of one turn."""

    microbatches_s: float
    loss: float
    """Mean of all microbatches of all steps, in nats per token."""
    bytes_per_token: float


def _play_alone(task: Task, folder: Path, log: Path, *, threads: int) -> Turn:
    with open_workers("whole model", [ALONE], log) as (worker,):
        answer = worker.ask("learn", manifest=task.manifest(), steps=task.all_steps, threads=threads)
    return turn_of(task, [answer], 0.0)


def _play_torch(task: Task, folder: Path, log: Path, *, schedule: str) -> Turn:
    request = {"schedule": schedule, "steps": task.all_steps, "rendezvous": str(folder / "rendezvous")}
    stages = range(task.num_stages)
    with open_workers("torch rank", [f"{TORCH} {stage}" for stage in stages], log) as ranks:
        answers = ask_all(ranks, "learn", [{"stage": stage} for stage in stages], manifest=task.manifest(), **request)
    return turn_of(task, answers, bytes_per_token(task.check(), task.tokens_per_step))


def _play_ours(task: Task, folder: Path, log: Path, *, codec: str, overlap: bool = False) -> Turn:
    stages = range(task.num_stages)
    with open_workers("stage node", [f"{OURS} {stage}" for stage in stages], log) as nodes:
        manifest = task.manifest(codec, overlap=overlap)
        heard = ask_all(nodes, "listen", [{"stage": stage} for stage in stages], manifest=manifest)
        ask_all(nodes, "join", addresses=[answer["addresses"] for answer in heard], folder=str(folder), log=str(log))
        answers = ask_all(nodes, "learn", steps=task.all_steps)
    num_bytes = sum(answer["bytes_sent"] for answer in answers)
    return turn_of(task, answers, num_bytes / (task.all_steps * task.tokens_per_step))


def turn_of(task: Task, answers: Sequence[dict[str, Any]], bytes_per_token: float) -> Turn:
    """Return the result of a turn, from the answers of a variant's processes, the one that draws first.

    The time runs from the end of the drawing process's warm-up, when it may draw, to the last process's last step.
    """
    (loss,) = [answer["loss"] for answer in answers if answer["loss"] is not None]
    drawing = answers[0]["stepped_at"]
    seconds = max(answer["stepped_at"][-1] for answer in answers) - drawing[WARMUP_STEPS - 1]
    return Turn((len(drawing) - WARMUP_STEPS) * task.num_microbatches / seconds, loss, bytes_per_token)


NUM_CORES: Final = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
VARIANTS: Final[dict[str, Callable[[Task, Path, Path], Turn]]] = {
    **{f"{ALONE}, threads: {n}": partial(_play_alone, threads=n) for n in dict.fromkeys([1, NUM_CORES])},
    **{f"{TORCH}, {name}, fp32": partial(_play_torch, schedule=name) for name in ("GPipe", "1F1B")},
    f"{OURS}, fp32": partial(_play_ours, codec="fp32"),
    f"{OURS}, int8": partial(_play_ours, codec="int8"),
    f"{OURS}, int8, steps overlap": partial(_play_ours, codec="int8", overlap=True),
}
"""In the order of their turns; the first is the baseline. Each is called with an empty folder, and a log."""


@dataclass(frozen=True, slots=True)
class VariantRates:
    """The turns of a variant together; the rate is their median."""

    name: str
    microbatches_s: float
    of_one_thread: float
    """The rate as a share of the baseline's."""
    bytes_per_token: float
    loss_error: float
    """The greatest error of the turns, relative to the baseline."""


@dataclass(slots=True)
class Throughput:
    """The turns with one model until now, by variant."""

    task: Task
    turns: dict[str, list[Turn]] = field(default_factory=dict)

    @property
    def rows(self) -> list[VariantRates]:
        """Return the rates of the variants that have had a turn."""
        rates = {name: statistics.median(turn.microbatches_s for turn in turns) for name, turns in self.turns.items()}
        (base_rate, *_), ((base, *_), *_) = rates.values(), self.turns.values()
        return [
            VariantRates(
                name,
                rates[name],
                rates[name] / base_rate,
                statistics.median(turn.bytes_per_token for turn in turns),
                max(abs(turn.loss - base.loss) / base.loss for turn in turns),
            )
            for name, turns in self.turns.items()
        ]

    @property
    def wrong(self) -> list[str]:
        """Return the exact variants whose losses differ from one process's."""
        exact = [row for row in self.rows if "int8" not in row.name]
        return [f"{row.name}: loss off by {row.loss_error:.1e}" for row in exact if row.loss_error > MAX_LOSS_ERROR]

    @property
    def size(self) -> str:
        """Return the model's size in words."""
        return f"{num_parameters(self.task.check()) / 1e6:.1f} M parameters in {self.task.num_stages} stages"

    def claims(self) -> list[Claim]:
        """Return our rates, compared with that of the faster of torch's schedules."""
        peers = [row.microbatches_s for row in self.rows if row.name.startswith(TORCH)]
        words = f"microbatches a second, {self.size}; theirs: the faster {TORCH}"
        return [
            Claim(f"{row.name}: {words}", f"{row.microbatches_s:.1f}", f"{max(peers):.1f}")
            for row in self.rows
            if row.name.startswith(OURS) and peers
        ]

    def grid(self) -> Grid:
        """Return the table of the variants."""
        peers = [row.microbatches_s for row in self.rows if row.name.startswith(TORCH)]
        cells = []
        for row in self.rows:
            is_alone = row.name.startswith(ALONE)
            cells.append(
                [
                    row.name,
                    f"{row.microbatches_s:.1f}",
                    f"{row.of_one_thread:.2f}",
                    f"{row.microbatches_s / max(peers):.2f}" if peers and not is_alone else "",
                    "" if is_alone else f"{row.bytes_per_token:,.0f}",
                    f"{row.loss_error:.0e}",
                ]
            )
        header = ["", "a second", "of 1 thread", "of the faster torch", "bytes a token", "loss off by"]
        batch = f"{self.task.num_microbatches} microbatches of {self.task.model['context']} tokens a step"
        return Grid(f"Microbatches a second: {self.size}, {batch}", header, cells)


def report(setting: dict[str, Any], models: Sequence[Throughput]) -> BenchReport:
    """Return tables and data; a variant with wrong losses is a miss."""
    models = [model for model in models if model.turns]
    data = {
        "models": [{"task": asdict(model.task), "rows": [asdict(row) for row in model.rows]} for model in models],
    }
    return BenchReport(
        setting,
        [model.grid() for model in models],
        data,
        misses=[miss for model in models for miss in model.wrong],
        claims=[claim for model in models for claim in model.claims()],
    )


def run(
    stages: Annotated[int, typer.Option(min=2, help="Number of stages that the model is cut into.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Inner steps that are timed, a turn.")] = 4,
    preset: Annotated[
        list[str] | None, typer.Option(help="A larger model to measure after the first one; repeatable.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each variant; the median counts.")] = 3,
    out: Out = OUT,
    write: Write = False,
) -> None:
    """Measure how fast a model in stages learns, in one process, in torch's pipelining and here.

    Example: [cyan]farandole testnet bench stages --stages 2 --repeats 1[/cyan]
    """
    larger = [preset_model(name) for name in ([LARGER] if preset is None else preset)]
    models = [MODEL, *({size: getattr(model, size) for size in MODEL} for model in larger)]
    tasks = [Task(num_stages=stages, steps=steps, model=model) for model in models]
    for task in tasks:
        task.check()
    choices: dict[str, Any] = {"repeats": repeats, "steps timed": steps}
    with open_bench("stages", out, write, **choices) as bench:
        bench.publish(report(bench.setting, measure(bench, tasks, repeats)))


def measure(bench: Bench, tasks: Sequence[Task], repeats: int) -> list[Throughput]:
    """Measure turn by turn, and write the results after each.

    Raises `BenchError`; `ManifestError` if the task's settings do not fit together.
    """
    models = [Throughput(task) for task in tasks]
    for model in models:
        for repeat, (name, play) in itertools.product(range(repeats), VARIANTS.items()):
            bench.say(f"{model.size}, turn {repeat + 1} of {repeats}: {name}")
            with tempfile.TemporaryDirectory(prefix="farandole-stages-") as folder:
                model.turns.setdefault(name, []).append(play(model.task, Path(folder), bench.log))
            bench.write(report(bench.setting, models))
    return models
