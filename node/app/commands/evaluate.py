"""``farandole eval``: a model's figures on the tasks of lm-evaluation-harness."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from farandole.protocol.wire.errors import FarandoleError

from ...base.settings import NodeSettings
from .options import AsJson, ComputesOn, ModelFolder, takes_settings
from .output import print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from ...inspect.evaluation import Evaluation, Figure

BATCH_SIZE: Final = 8
# Of texts as long as the model's context: more than this takes more memory than any GPU has.
MAX_BATCH_SIZE: Final = 4096


class ResultsFileError(FarandoleError):
    """The results cannot be written; the message says why."""


# The device's setting is the trainer's: `device` in the settings file must not decide about this command.
@takes_settings("tokenizer", "allow_model")
def evaluate(
    settings: NodeSettings,
    folder: ModelFolder = None,
    *,
    tasks: Annotated[
        str,
        typer.Option("--tasks", "-t", metavar="NAMES", help="Tasks, groups or patterns, with commas: hellaswag,arc_*."),
    ],
    num_fewshot: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Solved examples before each question.", show_default="as the task says"),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Only the first N documents of each task.", show_default="all"),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, max=MAX_BATCH_SIZE, metavar="N", help="Compute N texts at once; more take memory.")
    ] = BATCH_SIZE,
    include: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="More tasks: YAML files as the harness's. They may name Python functions, which run with your rights.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Write the harness's results there, as JSON.", dir_okay=False),
    ] = None,
    computes_on: ComputesOn = "cpu",
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on tasks of lm-evaluation-harness: this node's newest checkpoint, or a folder.

    It needs farandole's extra `eval`, which brings lm-eval. Data sets are downloaded from huggingface.co, and kept.
    The figure after ± is the statistical standard error over the documents. No code from data sets runs, and no code
    that a model writes; task files that you name yourself are code of yours. Few-shot examples and their order are the
    harness's.

    Examples: [cyan]farandole eval model --tasks hellaswag,arc_easy[/cyan];
    [cyan]farandole eval --tasks lambada_openai --limit 100 --json[/cyan];
    [cyan]farandole eval model --tasks mine --include tasks --out results.json --device auto[/cyan]
    """
    from rich.console import Console

    from ...base.system.priority import TRAINING_NICENESS, lower_thread_priority
    from ...inspect.evaluation import EvaluationPlan, evaluate_model

    names = tuple(name for name in (word.strip() for word in tasks.split(",")) if name)
    if not names:
        raise typer.BadParameter("name at least one task", param_hint="--tasks")
    if out is not None:
        _require_new(out)
    if folder is None:
        lower_thread_priority(TRAINING_NICENESS)
    wanted = EvaluationPlan(names, include, num_fewshot, limit, batch_size)
    evaluation = evaluate_model(settings, folder, wanted, computes_on, partial(typer.echo, err=True))
    if out is not None:
        _write(out, evaluation)
    figures = evaluation.figures()
    if as_json:
        from msgspec import to_builtins

        print_json({**evaluation.weights.facts, "limit": limit, "results": to_builtins(figures)})
        return
    typer.echo(evaluation.weights.origin, err=True)
    Console().print(_table(figures))
    if limit is not None:
        typer.echo(f"only the first {limit} documents of each task: no figures of whole tasks", err=True)


def _table(figures: Sequence[Figure]) -> Table:
    from rich.table import Column, Table

    numbers = [Column(name, justify="right", no_wrap=True) for name in ("shots", "documents", "value", "std. error")]
    table = Table(
        Column("task", overflow="fold"), Column("metric", overflow="fold"), *numbers, box=None, padding=(0, 2, 0, 0)
    )
    for each in figures:
        metric = each.metric if each.filter == "none" else f"{each.metric} ({each.filter})"
        arrow = "" if each.higher_is_better is None else " ↑" if each.higher_is_better else " ↓"
        counts = ("" if number is None else f"{number}" for number in (each.num_fewshot, each.documents))
        table.add_row(
            each.task, metric + arrow, *counts, f"{each.value:.4f}", "" if each.stderr is None else f"{each.stderr:.4f}"
        )
    return table


def _require_new(path: Path) -> None:
    """Raise `ResultsFileError` now, and not after hours of computing, if the file cannot be written."""
    if path.exists():
        raise ResultsFileError(f"{path} is there already: remove it, or name another with --out")
    if not path.parent.is_dir():
        raise ResultsFileError(f"there is no folder {path.parent}: make it, or name another file with --out")


def _write(path: Path, evaluation: Evaluation) -> None:
    import json

    from lm_eval.utils import handle_non_serializable

    text = json.dumps(evaluation.results, indent=2, ensure_ascii=False, default=handle_non_serializable)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ResultsFileError(f"cannot write {path}: {error.strerror}") from error
