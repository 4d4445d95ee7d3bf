from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from farandole.node.store.run_file import manifest_of
from farandole.protocol.run.rules import SLOW
from farandole.testnet.play.merge import loss_of, mean_weights, measure_merged, measuring_learner
from farandole.training.base.errors import CheckpointError
from farandole.training.engine.learner import Learner

RUN_ID = bytes(range(32))
MANIFEST = manifest_of(
    {
        "name": "a",
        "model": {"preset": "tiny", "context": 16},
        "inner": {"batch_size": 2, "learning_rate": 1e-2, "warmup_steps": 0},
    },
    Path(),
    0,
)


def replica(author: bytes) -> Learner:
    result = measuring_learner(MANIFEST, RUN_ID)
    result.sampler = result.sampler.of_author(author)
    for _ in range(20):
        result.learn()
    result.round_end.apply(None)
    return result


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Learner]:
    folder = tmp_path_factory.mktemp("replicas")
    result = {folder / name: replica(name.encode() * 8) for name in ("anna", "bert", "cora")}
    for path, each in result.items():
        each.checkpoint.save(path)
    return result


def test_the_merged_weights_are_the_very_mean(replicas: dict[Path, Learner]) -> None:
    means, spread = mean_weights(list(replicas))
    weights = torch.stack([each.round_end.outer.slow.clone() for each in replicas.values()])
    names = next(iter(replicas.values())).checkpoint.layout.shapes
    merged = torch.cat([means[f"{SLOW}/{name}"].flatten() for name in names])
    torch.testing.assert_close(merged, weights.mean(0))
    expected = weights.std(0, correction=0).mean() / weights.mean(0).square().mean().sqrt()
    assert spread == pytest.approx(float(expected), rel=1e-4)
    path = next(iter(replicas))
    assert mean_weights([path, path])[1] == 0.0


def test_the_mean_is_better_than_the_start(replicas: dict[Path, Learner]) -> None:
    merged = measure_merged(MANIFEST, RUN_ID, list(replicas))
    assert 5.0 < merged.loss_start < 6.5
    assert merged.loss_merged < merged.loss_start - 0.3
    assert (merged.bits_per_byte_start, merged.bits_per_byte_merged) == pytest.approx(
        (merged.loss_start / math.log(2), merged.loss_merged / math.log(2))
    ), "a token is a byte"


def test_a_model_in_stages_is_put_together_again(replicas: dict[Path, Learner], tmp_path: Path) -> None:
    """Each replica's checkpoint is in two parts, as if two nodes held them."""
    parts = []
    for path in replicas:
        tensors = load_file(path)
        for stage in range(2):
            part = {name: tensor for name, tensor in tensors.items() if ("layers.1." in name) is (stage == 1)}
            parts.append(tmp_path / f"{path.name}-{stage}")
            save_file(part, parts[-1])
    (together, spread), (whole, expected) = mean_weights(parts), mean_weights(list(replicas))
    assert spread == pytest.approx(expected)
    assert all(torch.equal(together.pop(name), tensor) for name, tensor in whole.items())
    assert not together
    with pytest.raises(CheckpointError, match="nobody held its stage"):
        loss_of(measuring_learner(MANIFEST, RUN_ID), mean_weights(parts[1::2])[0])
