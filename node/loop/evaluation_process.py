"""The process that evaluates a checkpoint: started for one evaluation, at low priority, and ended with it."""

from __future__ import annotations

import os
from typing import Final

import msgspec
import trio

from farandole.protocol.evaluation.evaluation_messages import (
    MAX_ANSWER_BYTES,
    EvaluationAnswer,
    EvaluationOrder,
    decode_answer,
)
from farandole.protocol.wire.errors import FarandoleError, LocalProtocolError

from ..base.nurseries import open_service_nursery
from ..base.system.groups import end_group, start_group
from ..base.system.signals import signal_name
from ..trainer.trainer import THREAD_VARIABLES

MODULE: Final = "farandole.node.inspect.evaluation_child"
# Of what it writes to its standard error: enough for its last words.
MAX_LAST_WORDS: Final = 4_096


class EvaluationFailedError(FarandoleError):
    """There is no result; the message is the reason."""


async def evaluate_in_process(order: EvaluationOrder) -> EvaluationAnswer:
    """Evaluate in a process of its own, which does not outlive this call. Raises `EvaluationFailedError`."""
    # It computes on one core: the others are the trainer's, and the harness's progress bars have no reader.
    environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1"), "TQDM_DISABLE": "1"}
    try:
        process = await start_group(MODULE, [msgspec.json.encode(order).decode()], environment)
    except OSError as error:
        raise EvaluationFailedError(f"its process cannot be started: {error}") from error
    try:
        output, last_words = await _read_both(process)
        code = await process.wait()
    finally:
        await end_group(process)
    if code:
        raise EvaluationFailedError(_epitaph(code, last_words))
    try:
        answer = decode_answer(output)
    except LocalProtocolError as error:
        raise EvaluationFailedError(str(error)) from error
    if answer.problem:
        raise EvaluationFailedError(answer.problem)
    return answer


async def _read_both(process: trio.Process) -> tuple[bytes, bytes]:
    """Return the process's output, and the end of its standard error, when both are closed."""
    assert process.stdout is not None
    assert process.stderr is not None
    output = last_words = b""
    errors_read = trio.Event()

    async def read_errors(stream: trio.abc.ReceiveStream) -> None:
        nonlocal last_words
        async for part in stream:
            last_words = (last_words + part)[-MAX_LAST_WORDS:]
        errors_read.set()

    async with open_service_nursery() as nursery:
        nursery.start_soon(read_errors, process.stderr)
        async for part in process.stdout:
            output += part
            if len(output) > MAX_ANSWER_BYTES:
                raise EvaluationFailedError(f"its process wrote more than {MAX_ANSWER_BYTES} bytes")
        await errors_read.wait()
    return output, last_words


def _epitaph(code: int, last_words: bytes) -> str:
    how = f"killed by signal {-code} ({signal_name(-code)})" if code < 0 else f"ended with code {code}"
    lines = last_words.decode(errors="replace").strip().splitlines()
    return f"its process was {how}" + (f": {lines[-1].strip()}" if lines else "")
