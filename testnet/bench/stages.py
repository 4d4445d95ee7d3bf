"""How fast a model in stages learns, and what activation codecs cost it: the benchmark of stages.

The same microbatches go through the same model in one process, in `torch.distributed.pipelining` over gloo, and in
farandole's nodes, one a stage, on the same cores. The variants take turns in one run, so that what else the machine
does hits all of them alike; figures are medians. A figure counts only if the variant learned what one process learns.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from farandole.protocol.manifest import ModelConfig
from farandole.protocol.presets import num_parameters

from ..grid import Grid
from ..section import Section, compose
from ..setting import setting
from .process import BenchError
from .stages_codecs import MODEL as CODEC_MODEL
from .stages_codecs import CodecLoss, codec_grid, codec_losses
from .stages_task import Task
from .stages_turns import ALONE, Turn, Variant, VariantRates, play, rows_of, variants

CODEC_STEPS: Final = 300
SEEDS: Final = 3


@dataclass(slots=True)
class Report:
    """What was measured so far."""

    setting: dict[str, Any]
    task: Task
    turns: list[tuple[Variant, Turn]] = field(default_factory=list)
    losses: list[CodecLoss] = field(default_factory=list)
    codec_model: ModelConfig = CODEC_MODEL

    @property
    def rows(self) -> list[VariantRates]:
        """Of the variants that have had a turn."""
        return rows_of(self.turns) if self.turns else []

    @property
    def wrong(self) -> list[str]:
        """Variants that learned something else than one process."""
        return [f"{row.who}, {row.how}: loss off by {row.loss_error:.1e}" for row in self.rows if not row.is_right]

    def document(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "setting": self.setting,
            "task": asdict(self.task),
            "num_parameters": _num_parameters(self.task),
            "rows": [asdict(row) for row in self.rows],
            "codec_losses": [asdict(each) for each in self.losses],
            "wrong": self.wrong,
        }

    def grids(self) -> list[Grid]:
        """Everything, for people."""
        grids = [throughput_grid(self.rows, self.task)] if self.turns else []
        return [*grids, codec_grid(self.losses, self.codec_model)] if self.losses else grids

    def markdown(self) -> str:
        """A document's section."""
        return compose(self.setting, *(grid.markdown() for grid in self.grids()))


def _num_parameters(task: Task) -> int:
    return num_parameters(task.check())


def throughput_grid(rows: list[VariantRates], task: Task) -> Grid:
    """The variants."""
    cells = [
        [
            f"{row.who}, {row.how}",
            f"{row.microbatches_s:.1f}",
            f"{row.of_one_thread:.2f}",
            f"{row.bytes_per_token:,.0f}" if row.who != ALONE else "",
            f"{row.mesh_cpu_ms:.1f} ms" if row.mesh_cpu_ms is not None else "",
            f"{row.loss_error:.0e}" if row is not rows[0] else "",
        ]
        for row in rows
    ]
    header = ["", "a second", "of 1 thread", "bytes a token", "mesh CPU", "loss off by"]
    title = (
        f"Microbatches a second: {_num_parameters(task) / 1e6:.1f} M parameters in {task.num_stages} stages, "
        f"{task.num_microbatches} microbatches of {task.model['context']} tokens a step"
    )
    return Grid(title, header, cells)


def run_stages_bench(
    out: Path,
    task: Task,
    repeats: int = 3,
    codec_steps: int = CODEC_STEPS,
    seeds: int = SEEDS,
    section: Section | None = None,
    codec_model: ModelConfig = CODEC_MODEL,
) -> Report:
    """Measure, with progress and tables on the terminal; ``out`` gets stages.json and stages.md as it goes.

    At the end the ``section`` is written. Raises `BenchError`, also if a variant learned something else than one
    process; `ManifestError` if the task's settings do not fit together; `SectionError`.
    """
    task.check()
    if section is not None:
        section.check()
    out.mkdir(parents=True, exist_ok=True)
    log = out / "stages.log"
    log.unlink(missing_ok=True)
    console = Console()
    choices = {"repeats": repeats, "steps timed": task.steps, "codecs' steps": codec_steps}
    report = Report({**setting(), **choices}, task, codec_model=codec_model)

    def note(*grids: Grid) -> None:
        (out / "stages.json").write_text(json.dumps(report.document(), indent=2) + "\n")
        (out / "stages.md").write_text(report.markdown())
        for grid in grids:
            console.print(grid.rich())

    with console.status("starting") as status:
        for repeat in range(repeats):
            for variant in variants():
                status.update(f"turn {repeat + 1} of {repeats}: {variant.name}")
                turn = play(variant, task, log)
                report.turns.append((variant, turn))
                note()
                console.print(
                    f"turn {repeat + 1} of {repeats}: {variant.name}: {turn.microbatches_s:.1f} microbatches/s",
                    highlight=False,
                )
        note(throughput_grid(report.rows, task))

        def show(codec: str, seed: int, step: int) -> None:
            status.update(f"seed {seed + 1} of {seeds}: activations as {codec}, step {step} of {codec_steps}")

        for result in codec_losses(codec_steps, seeds, progress=show, model=codec_model):
            report.losses.append(result)
            note()
        note(codec_grid(report.losses, codec_model))
    if report.wrong:
        raise BenchError(f"not what one process learns: {'; '.join(report.wrong)}")
    if section is not None:
        section.write(report.markdown())
    console.print(f"{out / 'stages.json'}, {out / 'stages.md'}", markup=False, highlight=False)
    return report
