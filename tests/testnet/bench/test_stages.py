"""The benchmark of stages, from given figures; `tests/documents/test_long.py` measures a small one."""

from __future__ import annotations

from typing import Any

import pytest

from farandole.testnet.bench.stages import Turn, claims_of, turn_of, wrong
from farandole.testnet.bench.worker.stages import Task

TINY = {"num_layers": 2, "width": 16, "num_heads": 2, "hidden": 32, "context": 16, "vocabulary": 256}
TASK = Task(num_stages=2, steps=2, model=TINY)


ALONE, PEER = "one process, threads: 1", "torch.distributed.pipelining, GPipe, fp32"
OURS, LOSSY = "farandole, fp32", "farandole, int8"


def test_what_is_timed_begins_when_the_first_is_warm_and_ends_when_the_last_is_done() -> None:
    """A turn has the loss of the one process that knows it."""
    answers: list[dict[str, Any]] = [
        {"stepped_at": [10.0, 11.0, 12.0], "loss": None},
        {"stepped_at": [10.5, 11.5, 14.0], "loss": 5.5},
    ]
    assert turn_of(TASK, answers) == Turn(2 * 16 / 4.0, 5.5)


def test_claims_are_of_medians_compared_with_the_faster_of_torchs_schedules() -> None:
    turns = {
        ALONE: [Turn(10, 5.0)],
        PEER: [Turn(20, 5.0)],
        "torch.distributed.pipelining, 1F1B, fp32": [Turn(21, 5.0)],
        OURS: [Turn(16, 5.0), Turn(19, 5.0), Turn(18, 5.0)],
    }
    (claim,) = claims_of(TASK, turns)
    assert claim.claim.startswith("farandole, fp32: microbatches a second, 0.0 M parameters in 2 stages")
    assert (claim.ours, claim.theirs) == ("18.0", "21.0")


@pytest.mark.parametrize(("loss", "is_wrong"), [(5.0, False), (5.00004, False), (5.0001, True)])
def test_what_travels_in_fp32_must_learn_the_same_in_every_turn(loss: float, is_wrong: bool) -> None:
    turns = {ALONE: [Turn(1, 5.0)], OURS: [Turn(1, 5.0), Turn(1, loss)], LOSSY: [Turn(1, 5.1)]}
    assert [miss.partition(":")[0] for miss in wrong(turns)] == (["farandole, fp32"] if is_wrong else [])
