"""Ranks of `torch.distributed` as one member: however the model is cut, the bytes are those of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from farandole.training.base.errors import TrainingError
from farandole.training.cluster.ranges import divided, pieces_of
from farandole.training.cluster.ranks import restarts_meet_the_dead
from farandole.training.model.model import build_model
from farandole.training.outer.codec import BLOCK

from ...patience import PATIENCE
from ..ranks_program import MODEL, SEED, hash_of


def play(kind: str, num_ranks: int, folder: Path, screening: str = "guard") -> list[list[list[str]]]:
    """The words of the lines that each rank prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.training.ranks_program", kind, screening]
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
def of_one_process(screening: str) -> list[list[str]]:
    [printed] = play("plain", 1, Path(), screening)
    return printed


# On several machines ("@N") the sums of the guard are rounded otherwise; the other rule compares them with limits only.
@pytest.mark.parametrize(
    ("kind", "num_ranks", "screening"),
    [
        *[("fsdp", 1, "guard"), ("fsdp", 2, "guard"), ("fsdp", 4, "guard"), ("replicated", 2, "guard")],
        *[("hsdp", 4, "guard"), ("both", 4, "guard")],
        *[("fsdp@2", 2, "similarity"), ("fsdp@2", 4, "similarity"), ("fsdp@3", 3, "similarity")],
        *[("hsdp@2", 4, "similarity"), ("both@2", 4, "similarity"), ("replicated@2", 2, "similarity")],
    ],
)
def test_however_a_model_is_cut_its_member_sends_and_learns_the_same_bits(
    kind: str, num_ranks: int, screening: str, tmp_path: Path
) -> None:
    """fp32, int8, fragments of int4, topk; for weights in fp32 and in bf16."""
    [[leader, _], *others] = play(kind, num_ranks, tmp_path, screening)
    [expected, _] = of_one_process(screening)
    assert leader == expected
    num_cases = len(expected) // 2
    parameters = [expected[num_cases - 1], expected[-1]]
    assert [hashes for hashes, _ in others] == [parameters] * (num_ranks - 1)


@pytest.mark.parametrize("screening", ["guard", "losses"])
def test_machines_judge_a_contribution_together_as_one_process_does(screening: str, tmp_path: Path) -> None:
    [[_, judged], _] = play("fsdp@2", 2, tmp_path, screening)
    [_, expected] = of_one_process(screening)
    assert (int(expected[0]) > 0) == (screening == "losses")
    assert screening == "losses" or any(0.0 < float(clip) < 1.0 for clip in expected)
    assert [float(number) for number in judged] == pytest.approx([float(number) for number in expected], rel=1e-5)


@pytest.mark.parametrize("kind", ["fsdp", "fsdp@2"])
def test_a_cluster_that_begins_a_run_of_a_built_in_model_has_the_weights_of_the_seed(kind: str, tmp_path: Path) -> None:
    expected = hash_of(build_model(MODEL, SEED).parameters())
    assert [hashes for [hashes, *_] in play(f"seed-{kind}", 2, tmp_path)] == [[expected], [expected]]


@pytest.mark.parametrize("kind", ["fsdp", "fsdp@2"])
def test_weights_that_are_no_numbers_in_one_rank_end_the_round_in_all(kind: str, tmp_path: Path) -> None:
    [[[leader], _], *_] = play(f"diverging-{kind}", 4, tmp_path)
    assert "diverged" in leader


@pytest.mark.parametrize(("kind", "said"), [("fsdp", "rank_3_is_lost"), ("fsdp@2", "another_machine_is_lost")])
def test_a_rank_that_dies_while_it_encodes_ends_the_round(kind: str, said: str, tmp_path: Path) -> None:
    [[[leader], *_], *_] = play(f"lost-{kind}", 4, tmp_path)
    assert said in leader


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process has touched")
def test_a_machine_has_only_its_own_part_of_the_vectors(tmp_path: Path) -> None:
    """Rank 0's also has the encoded bytes: two of some 24 bytes a parameter."""
    [one, several] = (
        [int(size) for [[size], *_] in play(f"memory-{kind}", 2, _made(tmp_path / kind))] for kind in ("fsdp", "fsdp@2")
    )
    assert all(0.4 * one[0] < size < 0.65 * one[0] for size in several)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_each_block_of_the_vector_is_one_ranks() -> None:
    """A block that straddles two ranks is the lower one's; fragments begin in the middle of ranges."""
    num_elements, part = 5000, slice(1300, 5000)
    ranges = [[(0, 700), (1400, 1500)], [(700, 1400), (1500, 4000)], [(4000, 5000), (1500, 1600)]]
    pieces = [pieces_of(own, part) for own in divided(ranges, num_elements)]
    covered = sorted((piece.start, piece.stop) for each in pieces for piece in each)
    assert [start for start, _ in covered] == [0, *[stop for _, stop in covered[:-1]]]
    assert covered[-1][1] == 3700
    assert all(start % BLOCK == 0 for start, _ in covered)
    assert pieces[0] == [], "the block of its elements 1400 to 1500 begins with an element of the second rank"
    assert pieces[2] == [slice(2816, 3700)]


def test_a_parameter_that_no_rank_has_whole_is_found() -> None:
    with pytest.raises(TrainingError, match="lack a part"):
        divided([[(0, 10)], [(20, 30)]], 30)


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
