"""A model's figures on tasks of lm-evaluation-harness, from weights on this disk: `farandole eval`.

The harness finds the tasks, loads their data, makes requests of them and computes the metrics; the model answers by
`farandole.training.evaluation.harness`. The harness's own command does a little more around it, such as listing all
packages of this machine in its results; that is left out. Seeds are those of its command, so few-shot examples are the
same.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from farandole.protocol.wire.errors import FarandoleError
from farandole.training.base.errors import TrainingError, how_to_add

from ..base.release import VERSION
from ..base.settings import NodeSettings
from .model_weights import ModelWeights
from .whole_model import open_whole_model, training_errors_for_people

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

SEED: Final = 1234
"""Seed of the choice of few-shot examples; the harness's default."""
NUM_RESAMPLED: Final = 1000
"""Resampled sets of documents by which the standard error of a metric is found that has no formula for it.

It is then right to some 2 %. The harness takes 100 times as many, which can take longer than the model does.
"""

_NUM_SIMILAR: Final = 3


class EvaluationError(FarandoleError):
    """The model cannot be evaluated here on these tasks; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """What to evaluate a model on, and how."""

    tasks: tuple[str, ...]
    """Names of tasks, groups and tags, patterns of them, or files."""
    include: Path | None
    """A folder with more tasks."""
    num_fewshot: int | None
    """Solved examples before each question; None: as each task says."""
    limit: int | None
    """Only the first documents of each task."""
    batch_size: int
    may_be_files: bool = True
    """Whether a task may be the path of a file; not where another person than the machine's owner names the tasks."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A metric of a task."""

    task: str
    metric: str
    filter: str
    """How the answers were read, if a task reads them in several ways; else "none"."""
    value: float
    stderr: float | None
    """None: unknown, or there is none for this metric."""
    higher_is_better: bool | None
    num_fewshot: int | None
    documents: int | None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What came out, and of which weights."""

    weights: ModelWeights
    results: dict[str, Any]
    """All that the harness returns, and the weights, for its ``results.json``."""

    def figures(self) -> list[Figure]:
        """Return the metrics of all tasks and groups, in the harness's order."""
        return [figure for task, values in self.results["results"].items() for figure in self._figures(task, values)]

    def _figures(self, task: str, values: dict[str, Any]) -> Iterator[Figure]:
        for key, value in values.items():
            metric, is_metric, filtered = key.partition(",")
            if not is_metric or metric.endswith("_stderr") or not isinstance(value, Real):
                continue
            stderr = values.get(f"{metric}_stderr,{filtered}")
            yield Figure(
                task=task,
                metric=metric,
                filter=filtered,
                value=float(value),
                stderr=float(stderr) if isinstance(stderr, Real) else None,
                higher_is_better=self.results["higher_is_better"].get(task, {}).get(metric),
                num_fewshot=self.results["n-shot"].get(task),
                documents=values.get("sample_len"),
            )


def evaluate_model(
    settings: NodeSettings, folder: Path | None, wanted: EvaluationPlan, device: str, say: Callable[[str], None]
) -> Evaluation:
    """Evaluate the newest weights (see `open_weights`) on tasks; it may take hours, and shows its progress.

    ``say`` gets notices of what takes long. Data sets may be downloaded. Raises `EvaluationError`, and what
    `open_whole_model` raises.
    """
    with open_whole_model(settings, folder) as model, _quiet_harness():
        loaded = _load_tasks(wanted, say)
        on_cpu = device in ("cpu", "auto")
        module, chosen = model.load(device, wanted.batch_size * model.context if on_cpu else 0)

        from farandole.training.evaluation.harness import HarnessModel

        asked = HarnessModel(
            module,
            model.tokenizer,
            context=model.context,
            vocabulary=model.vocabulary,
            device=chosen,
            batch_size=wanted.batch_size,
        )
        with training_errors_for_people():
            results = _evaluate(asked, loaded, wanted)
    facts = {"version": VERSION, **model.weights.facts, "device": chosen.description}
    return Evaluation(model.weights, {**results, "farandole": facts})


@contextlib.contextmanager
def _quiet_harness() -> Iterator[None]:
    """Import the harness, and keep what it says off the standard output, while the block runs.

    Raises `EvaluationError` if it is not installed.
    """
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")  # of the harness and its many dependencies, to their developers
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        # Its processes for standard errors would each print a traceback at Ctrl-C.
        os.environ["DISABLE_MULTIPROC"] = "1"
        try:
            import lm_eval.tasks  # noqa: F401  # whether it is there
        except ImportError as error:
            raise EvaluationError(
                f"evaluation needs the Python package 'lm-eval' ({error}): {how_to_add('eval')}"
            ) from error
        yield


def _load_tasks(wanted: EvaluationPlan, say: Callable[[str], None]) -> Any:
    """Return the tasks with their data. Raises `EvaluationError`."""
    manager = _task_manager(wanted, say)
    names = list(dict.fromkeys(name for task in wanted.tasks for name in _matching(manager, task, wanted)))
    try:
        return manager.load(names)
    except Exception as error:  # of the network, a parser, or a function of a task's
        raise EvaluationError(
            f"{', '.join(wanted.tasks)}: a task or its data cannot be loaded: {_line_of(error)}. Data sets come from "
            "huggingface.co unless the task's file names others: check that this machine reaches it. With "
            "HF_HUB_OFFLINE=1, what it has fetched before is used"
        ) from error


def _task_manager(wanted: EvaluationPlan, say: Callable[[str], None]) -> TaskManager:
    """Return what knows the tasks. The harness reads all of its 14,000 files first, which it need not for a user's."""
    from lm_eval.tasks import TaskManager

    if wanted.include is not None:
        own = TaskManager(include_path=wanted.include, include_defaults=False)
        if set(wanted.tasks) <= set(own.all_subtasks):
            return own
    say("reading the harness's list of tasks, which takes some seconds")
    return TaskManager(include_path=wanted.include)


def _matching(manager: TaskManager, task: str, wanted: EvaluationPlan) -> list[str]:
    """Return the names that a user's word stands for. Raises `EvaluationError` if there is none."""
    names: list[str] = manager.match_tasks([task])
    if names:
        return names
    if wanted.may_be_files and Path(task).is_file():
        return [task]
    similar = difflib.get_close_matches(task, manager.all_tasks, n=_NUM_SIMILAR)
    hint = f"did you mean {' or '.join(similar)}? " if similar else ""
    is_missing = "name the folder of its file with --include"
    where = is_missing if wanted.include is None else f"{wanted.include} has no such task"
    raise EvaluationError(
        f"lm-evaluation-harness knows no task {task!r}: {hint}`lm-eval ls tasks` lists them; for a task of your own, "
        f"{where}"
    )


def _evaluate(asked: Any, loaded: Any, wanted: EvaluationPlan) -> dict[str, Any]:
    """Ask the model, and return the harness's results. Raises `EvaluationError`, and `TrainingError`."""
    import lm_eval
    import numpy as np
    import torch
    from lm_eval.evaluator import evaluate

    random.seed(0)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    for task in loaded["tasks"].values():
        # As the harness's command: a task that has none in its file never has examples.
        if task.get_config("num_fewshot") != 0 and wanted.num_fewshot is not None:
            task.set_config(key="num_fewshot", value=wanted.num_fewshot)
        elif task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=SEED)
    began = time.time()
    try:
        results: dict[str, Any] = evaluate(
            asked, loaded, limit=wanted.limit, bootstrap_iters=NUM_RESAMPLED, log_samples=False
        )
    except TrainingError:
        raise
    except ValueError as error:  # the harness's refusals: tasks that run generated code, tasks with pictures
        raise EvaluationError(f"{', '.join(wanted.tasks)}: {_line_of(error)}") from error
    config = {"model": "farandole", **asdict(wanted), "fewshot_seed": SEED, "bootstrap_iters": NUM_RESAMPLED}
    return {**results, "config": config, "date": began, "lm_eval_version": lm_eval.__version__}


def _line_of(error: Exception) -> str:
    """Return the kind and the first line of an error."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".rstrip(".: ")
