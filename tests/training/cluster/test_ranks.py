"""Ranks of `torch.distributed` as one member: however the model is cut, the bytes are those of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from farandole.training.cluster.ranks import restarts_meet_the_dead

from ...patience import PATIENCE


def play(kind: str, num_ranks: int, folder: Path, judges: str = "") -> list[list[list[str]]]:
    """The words of the lines that each rank prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.training.ranks_program", kind, judges]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(num_ranks), str(folder / "meeting")],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[3],
        )
        for rank in range(num_ranks)
    ]
    try:
        with ThreadPoolExecutor(num_ranks) as threads:  # all at once: one that is dead and not awaited seems alive
            printed = list(threads.map(lambda rank: rank.communicate(timeout=PATIENCE)[0], ranks))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [[line.split() for line in each.splitlines()] for each in printed]


@cache
def of_one_process(judges: str) -> list[list[str]]:
    [printed] = play("plain", 1, Path(), judges)
    return printed


@pytest.mark.parametrize(
    ("kind", "num_ranks", "judges"),
    [
        *[("fsdp", 1, ""), ("fsdp", 3, "losses"), ("replicated", 2, "")],
        *[("hsdp", 4, ""), ("both", 4, "losses")],
    ],
)
def test_however_a_model_is_cut_its_member_sends_judges_and_learns_the_same_bits(
    kind: str, num_ranks: int, judges: str, tmp_path: Path
) -> None:
    """fp32, int8, fragments of int4, topk; for weights in fp32 and in bf16."""
    [[leader, judged], *others] = play(kind, num_ranks, tmp_path, judges)
    [expected, expected_judged] = of_one_process(judges)
    assert leader == expected
    assert judged == expected_judged
    assert (int(judged[0]) > 0) == (judges == "losses")
    assert judges or any(0.0 < float(clip) < 1.0 for clip in judged)
    num_cases = len(expected) // 2
    parameters = [expected[num_cases - 1], expected[-1]]
    assert [hashes for hashes, *_ in others] == [parameters] * (num_ranks - 1)


@pytest.mark.parametrize(
    ("environment", "meet"),
    [
        ({}, False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "0"}, False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_MAX_RESTARTS": "3"}, False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}, True),
    ],
)
def test_a_torchrun_whose_restarts_would_fail_is_recognized(environment: dict[str, str], meet: bool) -> None:
    assert restarts_meet_the_dead(environment) == meet
