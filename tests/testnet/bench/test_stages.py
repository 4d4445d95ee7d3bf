"""The benchmark of stages: its results from given figures; as a soak test, a tiny one with real processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from farandole.testnet.bench.process import BenchError
from farandole.testnet.bench.report import open_bench
from farandole.testnet.bench.stages import VARIANTS, Throughput, Turn, measure, report, turn_of
from farandole.testnet.bench.worker.stages import Task, bytes_per_token

TINY = {"num_layers": 2, "width": 16, "num_heads": 2, "hidden": 32, "context": 16, "vocabulary": 256}
TASK = Task(num_stages=2, steps=2, num_microbatches=4, model=TINY)


ALONE, PEER = "one process, threads: 1", "torch.distributed.pipelining, GPipe, fp32"
OURS, LOSSY = "farandole, fp32", "farandole, int8"


def turn(rate: float, loss: float = 5.0, bytes_per_token: float = 0.0) -> Turn:
    return Turn(rate, loss, bytes_per_token)


def test_what_is_timed_begins_when_the_first_is_warm_and_ends_when_the_last_is_done() -> None:
    """A turn has the loss of the one process that knows it."""
    answers: list[dict[str, Any]] = [
        {"stepped_at": [10.0, 11.0, 12.0], "loss": None},
        {"stepped_at": [10.5, 11.5, 14.0], "loss": 5.5},
    ]
    assert turn_of(TASK, answers, bytes_per_token=3.0) == Turn(2 * 4 / 4.0, 5.5, 3.0)


def test_rows_are_medians_and_shares_of_the_first_variant() -> None:
    turns = {ALONE: [turn(10), turn(30), turn(12)], OURS: [turn(16), turn(19), turn(18)]}
    alone, ours = Throughput(TASK, turns).rows
    assert (alone.microbatches_s, alone.of_one_thread) == (12, 1)
    assert (ours.microbatches_s, ours.of_one_thread) == (18, 1.5)


@pytest.mark.parametrize(("loss", "is_wrong"), [(5.0, False), (5.00004, False), (5.0001, True)])
def test_what_travels_in_fp32_must_learn_the_same_in_every_turn(loss: float, is_wrong: bool) -> None:
    turns = {ALONE: [turn(1)], OURS: [turn(1), turn(1, loss)], LOSSY: [turn(1, 5.1)]}
    wrong = [name.partition(":")[0] for name in Throughput(TASK, turns).wrong]
    assert wrong == (["farandole, fp32"] if is_wrong else [])


def test_bytes_of_a_line_of_stages_follow_from_its_shapes() -> None:
    """Three stages have two hops, each both ways; the ends exchange the gradients of 256 embeddings in every step."""
    model = msgspec.structs.replace(TASK.check(), num_stages=3)

    assert bytes_per_token(model, tokens_per_step=64) == 4 * (2 * 2 * 16 + 2 * 256 * 16 / 64)


@pytest.mark.parametrize("task", [replace(TASK, num_stages=1), replace(TASK, num_microbatches=1)])
def test_what_cannot_be_scheduled_is_refused(task: Task) -> None:
    with pytest.raises(BenchError, match="do not go through"):
        task.check()


def test_the_table_leaves_out_what_means_nothing() -> None:
    turns = {ALONE: [turn(10)], PEER: [turn(20, 5.0, 1_000.0)], OURS: [turn(16, 5.0, 1_234.0)]}

    assert Throughput(TASK, turns).grid().rows == [
        ["one process, threads: 1", "10.0", "1.00", "", "", "0e+00"],
        ["torch.distributed.pipelining, GPipe, fp32", "20.0", "2.00", "1.00", "1,000", "0e+00"],
        ["farandole, fp32", "16.0", "1.60", "0.80", "1,234", "0e+00"],
    ]


@pytest.mark.soak
def test_every_variant_learns_the_same(tmp_path: Path) -> None:
    with open_bench("stages", tmp_path) as bench:
        bench.publish(report(bench.setting, measure(bench, [TASK], 1)))

    written = json.loads((tmp_path / "stages.json").read_text())
    assert written["misses"] == []
    (model,) = written["models"]
    sent = {row["name"]: row["bytes_per_token"] for row in model["rows"]}
    assert sent.keys() == VARIANTS.keys()
    assert sent["farandole, fp32"] > sent["farandole, int8"] > 0
    assert written["claims"][0]["claim"].startswith("farandole, fp32: ")
