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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from farandole.protocol.run.models import num_parameters
from farandole.protocol.run.models import preset as preset_model

from .process import ask_all, open_workers
from .report import OUT, Claim, Out, Write, open_bench
from .worker.stages import MODEL, NUM_MICROBATCHES, WARMUP_STEPS, Task

# Its microbatches, of 512 tokens, take some hundreds of milliseconds on a core; those of the first model, some tens.
LARGER: Final = "10M"
ALONE, TORCH, OURS = "one process", "torch.distributed.pipelining", "farandole"
# Error of the mean loss of all steps, relative to one process; with fp32 variants differ only by the order of sums.
MAX_LOSS_ERROR: Final = 1e-5


@dataclass(frozen=True, slots=True)
class Turn:
    """The result of one turn."""

    rate: float
    """Microbatches a second."""
    loss: float
    """Mean of all microbatches of all steps, in nats per token."""


Turns = dict[str, list[Turn]]
"""Variant -> its turns."""


def _play_alone(task: Task, folder: Path, log: Path, *, threads: int) -> Turn:
    with open_workers("stages", [ALONE], log) as (worker,):
        answer = worker.ask("learn_whole", manifest=task.manifest(), steps=task.all_steps, threads=threads)
    return turn_of(task, [answer])


def _play_torch(task: Task, folder: Path, log: Path, *, schedule: str) -> Turn:
    request = {"schedule": schedule, "steps": task.all_steps, "rendezvous": str(folder / "rendezvous")}
    stages = range(task.num_stages)
    with open_workers("stages", [f"{TORCH} {stage}" for stage in stages], log) as ranks:
        answers = ask_all(
            ranks, "learn_stage", [{"stage": stage} for stage in stages], manifest=task.manifest(), **request
        )
    return turn_of(task, answers)


def _play_ours(task: Task, folder: Path, log: Path, *, codec: str, overlap: bool = False) -> Turn:
    stages = range(task.num_stages)
    with open_workers("stages:StageNode", [f"{OURS} {stage}" for stage in stages], log) as nodes:
        manifest = task.manifest(codec, overlap=overlap)
        heard = ask_all(nodes, "listen", [{"stage": stage} for stage in stages], manifest=manifest)
        ask_all(nodes, "join", addresses=[answer["addresses"] for answer in heard], folder=str(folder))
        answers = ask_all(nodes, "learn", steps=task.all_steps)
    return turn_of(task, answers)


def turn_of(task: Task, answers: Sequence[dict[str, Any]]) -> Turn:
    """Return the result of a turn, from the answers of a variant's processes, the one that draws first.

    The time runs from the end of the drawing process's warm-up, when it may draw, to the last process's last step.
    """
    (loss,) = [answer["loss"] for answer in answers if answer["loss"] is not None]
    drawing = answers[0]["stepped_at"]
    seconds = max(answer["stepped_at"][-1] for answer in answers) - drawing[WARMUP_STEPS - 1]
    return Turn((len(drawing) - WARMUP_STEPS) * NUM_MICROBATCHES / seconds, loss)


NUM_CORES: Final = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
VARIANTS: Final[dict[str, Callable[[Task, Path, Path], Turn]]] = {
    **{f"{ALONE}, threads: {n}": partial(_play_alone, threads=n) for n in dict.fromkeys([1, NUM_CORES])},
    **{f"{TORCH}, {name}, fp32": partial(_play_torch, schedule=name) for name in ("GPipe", "1F1B")},
    f"{OURS}, fp32": partial(_play_ours, codec="fp32"),
    f"{OURS}, int8": partial(_play_ours, codec="int8"),
    f"{OURS}, int8, steps overlap": partial(_play_ours, codec="int8", overlap=True),
}
"""In the order of their turns; the first is the baseline. Each is called with an empty folder, and a log."""


def wrong(turns: Turns) -> list[str]:
    """Return the exact variants whose losses differ from one process's, the first variant's."""
    ((base, *_), *_) = turns.values()
    errors = {name: max(abs(turn.loss - base.loss) / base.loss for turn in own) for name, own in turns.items()}
    return [
        f"{name}: loss off by {error:.1e}"
        for name, error in errors.items()
        if "int8" not in name and error > MAX_LOSS_ERROR
    ]


def claims_of(task: Task, turns: Turns) -> Iterator[Claim]:
    """Yield our rates, which are medians, compared with that of the faster of torch's schedules."""
    rates = {name: statistics.median(turn.rate for turn in own) for name, own in turns.items()}
    peer = max(rate for name, rate in rates.items() if name.startswith(TORCH))
    words = f"microbatches a second, {size_of(task)}; theirs: the faster {TORCH}"
    for name, rate in rates.items():
        if name.startswith(OURS):
            yield Claim(f"{name}: {words}", f"{rate:.1f}", f"{peer:.1f}")


def size_of(task: Task) -> str:
    """Return the model's size in words."""
    return f"{num_parameters(task.sizes()) / 1e6:.1f} M parameters in {task.num_stages} stages"


def run(
    stages: Annotated[
        int, typer.Option(min=2, max=NUM_MICROBATCHES, help="Number of stages that the model is cut into.")
    ] = 4,
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
        task.sizes()  # raises if the model cannot be cut so
    choices: dict[str, Any] = {"repeats": repeats, "steps timed": steps}
    with open_bench("stages", out, write, title="A model in stages", **choices) as bench:
        turns: list[Turns] = [{name: [] for name in VARIANTS} for _ in tasks]
        for task, of_task in zip(tasks, turns, strict=True):
            for repeat, (name, play) in itertools.product(range(repeats), VARIANTS.items()):
                bench.say(f"{size_of(task)}, turn {repeat + 1} of {repeats}: {name}")
                with tempfile.TemporaryDirectory(prefix="farandole-stages-") as folder:
                    of_task[name].append(play(task, Path(folder), bench.log))
        measured = [*zip(tasks, turns, strict=True)]
        data = {
            "models": [
                {"task": asdict(task), "turns": {name: [*map(asdict, own)] for name, own in of_task.items()}}
                for task, of_task in measured
            ]
        }
        claims = [claim for model in measured for claim in claims_of(*model)]
        bench.publish(claims, data, misses=[miss for _, of_task in measured for miss in wrong(of_task)])
