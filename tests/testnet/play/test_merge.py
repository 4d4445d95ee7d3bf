from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from farandole.node.store.run_file import manifest_of
from farandole.protocol.trainer.trainer_messages import TrainerSettings
from farandole.testnet.play.merge import measure_merged, merge_checkpoints
from farandole.training.base.errors import CheckpointError
from farandole.training.engine.learner import Learner, build_learner

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


def replica(author: bytes, steps: int) -> Learner:
    result = build_learner(MANIFEST, run_id=RUN_ID, author=author, settings=TrainerSettings(device="cpu"))
    for _ in range(steps):
        result.learn()
    result.round_end.apply(None)
    return result


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Learner]:
    folder = tmp_path_factory.mktemp("replicas")
    result = {folder / name: replica(name.encode() * 8, steps=20) for name in ("anna", "bert", "cora")}
    for path, each in result.items():
        each.checkpoint.save(path)
    return result


def test_the_merged_weights_are_the_very_mean(replicas: dict[Path, Learner], tmp_path: Path) -> None:
    layout = next(iter(replicas.values())).checkpoint.layout
    spread = merge_checkpoints(list(replicas), layout, RUN_ID, tmp_path / "merged")
    weights = torch.stack([each.round_end.slow_weights() for each in replicas.values()])
    merged = build_learner(MANIFEST, run_id=RUN_ID, author=bytes(32), settings=TrainerSettings(device="cpu"))
    merged.checkpoint.load(tmp_path / "merged")
    torch.testing.assert_close(merged.round_end.slow_weights(), weights.mean(0))
    expected = weights.std(0, correction=0).mean() / weights.mean(0).square().mean().sqrt()
    assert spread == pytest.approx(float(expected), rel=1e-4)
    path = next(iter(replicas))
    assert merge_checkpoints([path, path], layout, RUN_ID, tmp_path / "equal") == 0.0
    with safe_open(path, framework="pt") as before, safe_open(tmp_path / "equal", framework="pt") as after:
        assert before.metadata() == after.metadata()


def test_what_the_inner_optimizer_keeps_of_some_parameters_alone_is_merged_too(tmp_path: Path) -> None:
    """Muon keeps no mean of squares for matrices."""
    inner = msgspec.structs.replace(MANIFEST.inner, optimizer="muon")
    manifest = msgspec.structs.replace(MANIFEST, inner=inner)
    paths = [tmp_path / name for name in ("anna", "bert")]
    each = [
        build_learner(manifest, run_id=RUN_ID, author=name.name.encode() * 8, settings=TrainerSettings(device="cpu"))
        for name in paths
    ]
    for path, learner in zip(paths, each, strict=True):
        learner.learn()
        learner.round_end.apply(None)
        learner.checkpoint.save(path)
    merge_checkpoints(paths, each[0].checkpoint.layout, RUN_ID, tmp_path / "merged")
    assert load_file(tmp_path / "merged").keys() == load_file(paths[0]).keys()
    each[0].checkpoint.load(tmp_path / "merged")


def test_the_mean_is_better_than_the_start(replicas: dict[Path, Learner], tmp_path: Path) -> None:
    merged = measure_merged(MANIFEST, RUN_ID, list(replicas), tmp_path / "merged")
    assert 5.0 < merged.loss_start < 6.5
    assert merged.loss < merged.loss_start - 0.3
    assert (merged.bits_per_byte_start, merged.bits_per_byte) == pytest.approx(
        (merged.loss_start / math.log(2), merged.loss / math.log(2))
    ), "a token is a byte"


def test_a_model_in_stages_is_put_together_again(replicas: dict[Path, Learner], tmp_path: Path) -> None:
    """Each replica's checkpoint is in two parts, as if two nodes held them."""
    parts = []
    for path in replicas:
        tensors = load_file(path)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        for stage in range(2):
            part = {name: tensor for name, tensor in tensors.items() if ("layers.1." in name) is (stage == 1)}
            parts.append(tmp_path / f"{path.name}-{stage}")
            save_file(part, parts[-1], metadata)
    each = next(iter(replicas.values()))
    spread = merge_checkpoints(parts, each.checkpoint.layout, RUN_ID, tmp_path / "together")
    assert spread == merge_checkpoints(list(replicas), each.checkpoint.layout, RUN_ID, tmp_path / "merged")
    assert (tmp_path / "together").read_bytes() == (tmp_path / "merged").read_bytes()
    with pytest.raises(CheckpointError, match="nobody held its stage"):
        merge_checkpoints(parts[1::2], each.checkpoint.layout, RUN_ID, tmp_path / "half")
