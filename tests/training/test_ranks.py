"""Ranks of `torch.distributed` as one member: however the model is cut, the bytes are those of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from farandole.training.codec import BLOCK
from farandole.training.errors import TrainingError
from farandole.training.model import build_model
from farandole.training.ranks import restarts_meet_the_dead
from farandole.training.shared_vectors import own_ranges, pieces_of

from ..patience import PATIENCE
from .ranks_program import MODEL, SEED, hash_of


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


# "apart": the ranks share no memory, as on two machines.
@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [("fsdp", 1), ("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("both", 4), ("replicated", 2), ("apart", 2)],
)
def test_however_a_model_is_cut_its_member_sends_and_learns_the_same_bits(
    kind: str, num_ranks: int, tmp_path: Path
) -> None:
    """fp32, int8, fragments of int4, topk; for weights in fp32 and in bf16."""
    [leader, *others] = play(kind, num_ranks, tmp_path)
    expected = of_one_process()
    assert leader == expected
    num_cases = len(expected) // 2
    parameters = [expected[num_cases - 1], expected[-1]]
    assert others == [parameters] * (num_ranks - 1)


@pytest.mark.parametrize("kind", ["fsdp", "apart"])
def test_a_cluster_that_begins_a_run_of_a_built_in_model_has_the_weights_of_the_seed(kind: str, tmp_path: Path) -> None:
    expected = hash_of(build_model(MODEL, SEED).parameters())
    assert [printed.strip() for [printed] in play(f"seed-{kind}", 2, tmp_path)] == [expected, expected]


def test_each_block_of_the_vector_is_one_ranks() -> None:
    """A block that straddles two ranks is the lower one's; fragments begin in the middle of ranges."""
    num_elements, part = 5000, slice(1300, 5000)
    ranges = [[(0, 700), (1400, 1500)], [(700, 1400), (1500, 4000)], [(4000, 5000), (1500, 1600)]]
    pieces = [pieces_of(own_ranges(ranges, rank, num_elements), part) for rank in range(3)]
    covered = sorted((piece.start, piece.stop) for each in pieces for piece in each)
    assert [start for start, _ in covered] == [0, *[stop for _, stop in covered[:-1]]]
    assert covered[-1][1] == 3700
    assert all(start % BLOCK == 0 for start, _ in covered)
    assert pieces[0] == [], "the block of its elements 1400 to 1500 begins with an element of the second rank"
    assert pieces[2] == [slice(2816, 3700)]


def test_a_parameter_that_no_rank_has_whole_is_found() -> None:
    with pytest.raises(TrainingError, match="lack a part"):
        own_ranges([[(0, 10)], [(20, 30)]], 0, 30)


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
