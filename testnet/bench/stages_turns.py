"""One turn of a variant of the benchmark of stages: its processes start, learn, and end."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from .process import ask_all, median_of, open_workers
from .stages_task import WARMUP_STEPS, Task

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
    with open_workers("stages_alone:Alone", [ALONE], log) as (worker,):
        answer = worker.ask("learn", manifest=task.manifest(), steps=task.all_steps, threads=threads)
    return turn_of(task, [answer], 0.0)


def _play_torch(task: Task, folder: Path, log: Path, *, schedule: str) -> Turn:
    from .stages_torch import bytes_per_token

    request = {"schedule": schedule, "steps": task.all_steps, "rendezvous": str(folder / "rendezvous")}
    with open_workers("stages_torch:Rank", _names(TORCH, task), log) as ranks:
        answers = ask_all(ranks, "learn", _stages(task), manifest=task.manifest(), **request)
    return turn_of(task, answers, bytes_per_token(task.check(), task.tokens_per_step))


def _play_ours(task: Task, folder: Path, log: Path, *, codec: str, overlap: bool = False) -> Turn:
    with open_workers("stages_node:StageNode", _names(OURS, task), log) as nodes:
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
