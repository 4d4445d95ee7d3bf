"""Messages between the mesh process and the process that evaluates a checkpoint: JSON, one line each.

The order is the process's argument, the answer the last line of its standard output.
"""

from __future__ import annotations

import msgspec

from ..wire.errors import LocalProtocolError


class EvaluationOrder(msgspec.Struct, frozen=True):
    """What to evaluate this node's newest checkpoint on, and how."""

    home: str
    tasks: tuple[str, ...]
    limit: int | None
    """Only the first documents of each task; None: all."""
    num_fewshot: int | None
    include: str | None
    """Folder with the owner's task files."""
    tokenizer: str | None
    allow_model: tuple[str, ...]
    device: str


class MeasuredFigure(msgspec.Struct, frozen=True):
    """A metric of a task, as the harness computed it."""

    task: str
    metric: str
    """With ``,FILTER`` behind it, if the task reads answers in several ways."""
    value: float
    stderr: float | None


class EvaluationAnswer(msgspec.Struct, frozen=True):
    """Figures of the weights of a round; or, if there are none, the reason."""

    round: int = 0
    figures: tuple[MeasuredFigure, ...] = ()
    problem: str = ""


MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""Bounds what the mesh process keeps of the output: all 14,000 tasks of the harness make a few megabytes."""


def decode_order(text: str) -> EvaluationOrder:
    """Decode an order. Raises `msgspec.MsgspecError`."""
    return msgspec.json.decode(text, type=EvaluationOrder)


def decode_answer(output: bytes) -> EvaluationAnswer:
    """Decode the last line of an output. Raises `LocalProtocolError` if it is no answer."""
    try:
        return msgspec.json.decode(output.rstrip().rpartition(b"\n")[2], type=EvaluationAnswer)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise LocalProtocolError(f"no answer of an evaluation: {error}") from error
