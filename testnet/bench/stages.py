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

from ..report.section import Grid, cell
from .process import ask_all, median_of, open_workers
from .report import OUT, Bench, BenchReport, Claim, Out, Write, open_bench
from .worker.stages_task import MODEL, WARMUP_STEPS, Task

# Its microbatches, of 512 tokens, take some hundreds of milliseconds on a core; those of the first model, some tens.
LARGER: Final = "10M"
ALONE: Final = "one process"
TORCH: Final = "torch.distributed.pipelining"
OURS: Final = "farandole"
SCHEDULES: Final = ("GPipe", "1F1B")
CODECS: Final = ("fp32", "bf16", "int8")
# Error of the mean loss of all steps, relative to one process; with fp32 variants differ only by the order of sums.
MAX_LOSS_ERROR: Final = 1e-5


@dataclass(frozen=True, slots=True)
class Turn:
    """The result of one turn."""

    microbatches_s: float
    loss: float
    """Mean of all microbatches of all steps, in nats per token."""
    bytes_per_token: float
    mesh_cpu_ms: float | None = None
    """CPU time of all mesh processes together, per microbatch."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to compute the task."""

    who: str
    how: str
    is_exact: bool
    """Whether its losses must equal one process's."""
    play: Callable[[Task, Path, Path], Turn]
    """Called with an empty folder, and a log."""

    @property
    def name(self) -> str:
        """Return the name for tables."""
        return f"{self.who}, {self.how}"


@dataclass(frozen=True, slots=True)
class VariantRates:
    """The turns of a variant together; rates are medians."""

    who: str
    how: str
    microbatches_s: float
    turns_microbatches_s: list[float]
    of_one_thread: float
    """The rate as a share of one process's with one thread."""
    bytes_per_token: float
    mesh_cpu_ms: float | None
    loss: float
    loss_error: float
    """The greatest error of the turns, relative to one process."""
    is_exact: bool

    @property
    def is_right(self) -> bool:
        """Return whether the losses are as required."""
        return not self.is_exact or self.loss_error <= MAX_LOSS_ERROR


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def variants() -> list[Variant]:
    """Return the variants in the order of their turns; the first is the baseline."""
    threads = dict.fromkeys([1, num_cores()])
    return [
        *(Variant(ALONE, _threads(count), True, partial(_play_alone, threads=count)) for count in threads),
        *(Variant(TORCH, f"{name}, fp32", True, partial(_play_torch, schedule=name)) for name in SCHEDULES),
        *(Variant(OURS, codec, codec == "fp32", partial(_play_ours, codec=codec)) for codec in CODECS),
        Variant(OURS, "int8, steps overlap", False, partial(_play_ours, codec="int8", overlap=True)),
    ]


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def play(variant: Variant, task: Task, log: Path) -> Turn:
    """Play one turn. Raises `BenchError`."""
    with tempfile.TemporaryDirectory(prefix="farandole-stages-") as folder:
        return variant.play(task, Path(folder), log)


def rows_of(turns: Sequence[tuple[Variant, Turn]]) -> list[VariantRates]:
    """Return a row for each variant, in the order of their first turns; the first variant is the baseline."""
    by_variant: dict[str, list[tuple[Variant, Turn]]] = {}
    for variant, turn in turns:
        by_variant.setdefault(variant.name, []).append((variant, turn))
    base = [turn for _, turn in next(iter(by_variant.values()))]
    base_rate, base_loss = _median_rate(base), base[0].loss
    return [_row(group[0][0], [turn for _, turn in group], base_rate, base_loss) for group in by_variant.values()]


def _row(variant: Variant, turns: Sequence[Turn], base_rate: float, base_loss: float) -> VariantRates:
    rate = _median_rate(turns)
    return VariantRates(
        variant.who,
        variant.how,
        rate,
        [turn.microbatches_s for turn in turns],
        rate / base_rate,
        statistics.median(turn.bytes_per_token for turn in turns),
        median_of([turn.mesh_cpu_ms for turn in turns]),
        turns[0].loss,
        max(abs(turn.loss - base_loss) / base_loss for turn in turns),
        variant.is_exact,
    )


def _median_rate(turns: Sequence[Turn]) -> float:
    return statistics.median(turn.microbatches_s for turn in turns)


def rate(stepped_at: Sequence[Sequence[float]], num_microbatches: int) -> float:
    """Return microbatches per second, without the warm-up, from each process's step times, the one that draws first.

    The time runs from the end of the drawing process's warm-up, when it may draw, to the last process's last step.
    """
    seconds = max(times[-1] for times in stepped_at) - stepped_at[0][WARMUP_STEPS - 1]
    return (len(stepped_at[0]) - WARMUP_STEPS) * num_microbatches / seconds


def turn_of(task: Task, answers: Sequence[dict[str, Any]], bytes_per_token: float) -> Turn:
    """Return the result of a turn, from the answers of a variant's processes."""
    (loss,) = [answer["loss"] for answer in answers if answer["loss"] is not None]
    cpu = [answer["cpu_seconds"] for answer in answers if "cpu_seconds" in answer]
    cpu_seconds = sum(seconds[-1] - seconds[WARMUP_STEPS - 1] for seconds in cpu)
    return Turn(
        rate([answer["stepped_at"] for answer in answers], task.num_microbatches),
        loss,
        bytes_per_token,
        1e3 * cpu_seconds / (task.steps * task.num_microbatches) if cpu else None,
    )


def _play_alone(task: Task, folder: Path, log: Path, *, threads: int) -> Turn:
    with open_workers("whole model", [ALONE], log) as (worker,):
        answer = worker.ask("learn", manifest=task.manifest(), steps=task.all_steps, threads=threads)
    return turn_of(task, [answer], 0.0)


def _play_torch(task: Task, folder: Path, log: Path, *, schedule: str) -> Turn:
    from .worker.stages_torch import bytes_per_token

    request = {"schedule": schedule, "steps": task.all_steps, "rendezvous": str(folder / "rendezvous")}
    with open_workers("torch rank", _names(TORCH, task), log) as ranks:
        answers = ask_all(ranks, "learn", _stages(task), manifest=task.manifest(), **request)
    return turn_of(task, answers, bytes_per_token(task.check(), task.tokens_per_step))


def _play_ours(task: Task, folder: Path, log: Path, *, codec: str, overlap: bool = False) -> Turn:
    with open_workers("stage node", _names(OURS, task), log) as nodes:
        heard = ask_all(nodes, "listen", _stages(task), manifest=task.manifest(codec, overlap=overlap))
        addresses = [answer["addresses"] for answer in heard]
        ask_all(nodes, "join", addresses=addresses, folder=str(folder), log=str(log))
        answers = ask_all(nodes, "learn", steps=task.all_steps)
    num_bytes = sum(answer["bytes_sent"] for answer in answers)
    return turn_of(task, answers, num_bytes / (task.all_steps * task.tokens_per_step))


def _stages(task: Task) -> list[dict[str, Any]]:
    return [{"stage": stage} for stage in range(task.num_stages)]


def _names(who: str, task: Task) -> list[str]:
    return [f"{who} {stage}" for stage in range(task.num_stages)]


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

    def claims(self) -> list[Claim]:
        """Return our rates, beside that of the faster of torch's schedules."""
        peers = [row.microbatches_s for row in self.rows if row.who == TORCH]
        size = f"{_num_parameters(self.task) / 1e6:.1f} M parameters in {self.task.num_stages} stages"
        words = f"microbatches a second, {size}; theirs: the faster {TORCH}"
        return [
            Claim(f"{row.how}: {words}", f"{row.microbatches_s:.1f}", f"{max(peers):.1f}")
            for row in self.rows
            if row.who == OURS and peers
        ]

    def data(self) -> dict[str, Any]:
        """Return the figures for the report's data."""
        rows = [asdict(row) for row in self.rows]
        return {"task": asdict(self.task), "num_parameters": _num_parameters(self.task), "rows": rows}


@dataclass(slots=True)
class StagesFigures:
    """The measurements until now."""

    models: list[Throughput] = field(default_factory=list)

    def report(self, setting: dict[str, Any]) -> BenchReport:
        """Return tables and data; a variant with wrong losses is a miss."""
        data = {"models": [model.data() for model in self.models]}
        grids = [throughput_grid(model.rows, model.task) for model in self.models if model.turns]
        misses = [miss for model in self.models for miss in model.wrong]
        claims = [claim for model in self.models for claim in model.claims()]
        return BenchReport(setting, grids, data, misses=misses, claims=claims)


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
        bench.publish(measure(bench, tasks, repeats).report(bench.setting))


def measure(bench: Bench, tasks: Sequence[Task], repeats: int) -> StagesFigures:
    """Measure turn by turn, and write the results after each.

    Raises `BenchError`; `ManifestError` if the task's settings do not fit together.
    """
    figures = StagesFigures([Throughput(task) for task in tasks])
    for model in figures.models:
        size = f"{_num_parameters(model.task) / 1e6:.1f} M"
        for repeat, variant in itertools.product(range(repeats), variants()):
            bench.say(f"{size}, turn {repeat + 1} of {repeats}: {variant.name}")
            model.turns.append((variant, play(variant, model.task, bench.log)))
            bench.write(figures.report(bench.setting))
    return figures
