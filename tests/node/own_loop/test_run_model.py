"""The model of a run, for a loop of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import farandole
from farandole.protocol.wire.errors import ManifestError

from ..small_runs import small_manifest, write_run


def test_a_runs_model_has_the_seeds_weights_and_computes_the_loss(tmp_path: Path) -> None:
    write_run(tmp_path, small_manifest(seed=3))
    one, same = (farandole.model_of(tmp_path / "run.manifest") for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(one.parameters(), same.parameters(), strict=True))
    tokens = torch.zeros(2, 8, dtype=torch.long)
    assert one(tokens).shape == (2, 8, 256)
    assert one(tokens, tokens).shape == ()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data": {"epochs": 2}}, "data.epochs"),
        (
            {
                "model": {
                    **dict.fromkeys(("width", "num_heads", "hidden", "context", "vocabulary"), 0),
                    "num_layers": 1,
                    "external": {"parameters": {"weight": [2]}},
                },
                "data": {},
                "inner": {},
            },
            "other members",
        ),
    ],
)
def test_a_run_whose_model_a_loop_cannot_train_so_is_refused(
    tmp_path: Path, settings: dict[str, object], words: str
) -> None:
    write_run(tmp_path, small_manifest(**settings))
    with pytest.raises(ManifestError, match=words):
        farandole.model_of(tmp_path / "run.manifest")


def test_without_a_run_there_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="knows no run: farandole join INVITE"):
        farandole.model_of(home=tmp_path)
    with pytest.raises(ManifestError, match="is no manifest that can be read"):
        farandole.model_of(tmp_path / "nothing")
