"""Entry point of the evaluation process: ``python -m farandole.node.inspect.evaluation_child ORDER``.

The mesh process starts it for each evaluation in a run (`farandole.node.loop.evaluation_process`). It ends when its
standard input does, which the mesh process holds open.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Final

import msgspec

from farandole.protocol.evaluation.evaluation_messages import (
    EvaluationAnswer,
    EvaluationOrder,
    MeasuredFigure,
    decode_order,
)
from farandole.protocol.wire.errors import FarandoleError

from ..base.settings import NodeSettings
from ..base.system.priority import EVALUATING_NICENESS, lower_priority
from ..base.system.proc import write_proc
from ..base.system.signals import ignore_stop_signals
from .evaluation import EvaluationPlan, evaluate_model

# When memory is used up, the kernel kills this process before the trainer, which has 500.
OOM_SCORE_ADJUSTMENT: Final = 700
BATCH_SIZE: Final = 8


def main() -> None:
    """Evaluate as ordered, and print the answer."""
    (order,) = sys.argv[1:]
    ignore_stop_signals()  # Ctrl-C is for the daemon, which ends this process
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    lower_priority(EVALUATING_NICENESS)
    write_proc("self/oom_score_adj", str(OOM_SCORE_ADJUSTMENT))
    try:
        answer = answer_to(decode_order(order))
    except FarandoleError as error:
        answer = EvaluationAnswer(problem=str(error))
    print(msgspec.json.encode(answer).decode(), flush=True)


def answer_to(order: EvaluationOrder) -> EvaluationAnswer:
    """Evaluate this node's newest checkpoint. Raises `FarandoleError`."""
    tokenizer = None if order.tokenizer is None else Path(order.tokenizer)
    settings = NodeSettings(home=Path(order.home), tokenizer=tokenizer, allow_model=list(order.allow_model))
    include = None if order.include is None else Path(order.include)
    plan = EvaluationPlan(order.tasks, include, order.num_fewshot, order.limit, BATCH_SIZE, may_be_files=False)
    evaluation = evaluate_model(settings, None, plan, order.device, lambda notice: None)
    figures = tuple(
        MeasuredFigure(
            each.task,
            each.metric if each.filter == "none" else f"{each.metric},{each.filter}",
            each.value,
            each.stderr,
        )
        for each in evaluation.figures()
    )
    return EvaluationAnswer(evaluation.weights.round or 0, figures)


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
