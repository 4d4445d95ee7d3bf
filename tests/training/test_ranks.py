"""Ranks of `torch.distributed` as one member: however the model is cut, the bytes are those of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from farandole.training.ranks import restarts_meet_the_dead

from ..patience import PATIENCE


def play(kind: str, num_ranks: int, folder: Path) -> list[list[str]]:
    """What each rank prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.training.ranks_program", kind]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(num_ranks), str(folder / "meeting")],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[2],
        )
        for rank in range(num_ranks)
    ]
    try:
        return [rank.communicate(timeout=PATIENCE)[0].split(" ") for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@cache
def of_one_process() -> list[str]:
    [printed] = play("plain", 1, Path())
    return printed


@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [("fsdp", 1), ("fsdp", 2), ("hsdp", 4), ("both", 4), ("replicated", 2)],
)
def test_however_a_model_is_cut_its_member_sends_and_learns_the_same_bits(
    kind: str, num_ranks: int, tmp_path: Path
) -> None:
    [leader, *others] = play(kind, num_ranks, tmp_path)
    sent, state, parameters = of_one_process()
    assert leader == [sent, state, parameters]
    assert [rank[2] for rank in others] == [parameters] * (num_ranks - 1)


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
