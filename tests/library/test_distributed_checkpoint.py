"""Checkpoints of `torch.distributed.checkpoint`: a run begins with what a cluster saved (docs/your-own-loop.md)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import farandole

from ..patience import PATIENCE
from ..training.ranks_program import build


def saved_by_two_ranks(folder: Path) -> Path:
    command = [sys.executable, "-m", "tests.library.checkpoint_program"]
    paths = [str(folder / "meeting"), str(folder / "checkpoint")]
    root = Path(__file__).parents[2]
    ranks = [subprocess.Popen([*command, str(rank), "2", *paths], cwd=root) for rank in range(2)]
    try:
        assert [rank.wait(PATIENCE) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return folder / "checkpoint"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_begins_with_what_a_cluster_has_saved(tmp_path: Path) -> None:
    """Two ranks of FSDP2 save a model, and one process makes a run of it: the run's first weights are those."""
    from torch.distributed.checkpoint.state_dict_loader import load  # takes four seconds

    state = {"model": {name: torch.zeros_like(value) for name, value in build().state_dict().items()}}
    load(state, checkpoint_id=saved_by_two_ranks(tmp_path), no_dist=True)
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    model.load_state_dict(state["model"])
    run = farandole.create_run(model, tmp_path / "run")
    [file] = (run / "start").glob("*.safetensors")
    stored = {name.partition("/")[2]: value for name, value in load_file(file).items()}
    for name, parameter in build().named_parameters():
        assert torch.equal(stored[name], parameter.detach()), name
