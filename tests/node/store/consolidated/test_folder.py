from __future__ import annotations

import resource
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from farandole.node.base.errors import Exit
from farandole.node.store.consolidated.folder import (
    CHECKPOINT_NAME,
    INDEX_NAME,
    MANIFEST_NAME,
    consolidate,
    read_folder,
    verify_hashes,
)
from farandole.node.store.consolidated.tensors import ConsolidatedError, open_tensors
from farandole.protocol.run.invite import Invite, encode_invite
from farandole.protocol.run.manifest import InnerConfig, SignedManifest, decode_manifest
from farandole.protocol.run.models import shapes_of
from farandole.protocol.run.rules import OPTIMIZER_VECTORS
from farandole.protocol.wire.identity import peer_id_of
from farandole.training.engine.learner import Learner

from ...conftest import Cli
from .runs import KEY, MODELS, VECTORS, manifest_for, pulled, save_stages, trained

NAMES = (b"anna" * 8, b"bert" * 8, b"cora" * 8)


@pytest.fixture(scope="module")
def run() -> SignedManifest:
    return manifest_for({**MODELS["own"], "num_stages": 3})


@pytest.fixture(scope="module")
def replicas(run: SignedManifest) -> list[Learner]:
    return [trained(run, name) for name in NAMES]


@pytest.fixture(scope="module")
def stages(run: SignedManifest, replicas: list[Learner], tmp_path_factory: pytest.TempPathFactory) -> list[list[Path]]:
    """Return, for each stage, the checkpoints of three replicas."""
    folder = tmp_path_factory.mktemp("stages")
    saved = [
        save_stages(replica, run, folder, name[:4].decode()) for replica, name in zip(replicas, NAMES, strict=True)
    ]
    return [list(paths) for paths in zip(*saved, strict=True)]


@pytest.fixture
def merge(run: SignedManifest, stages: list[list[Path]]) -> Callable[..., bytes]:
    """Return a function that writes the mean of the replicas into a folder."""
    return partial(consolidate, key=KEY, raw_manifest=run.encode(), stages=stages, vectors=VECTORS)


@pytest.fixture
def folder(merge: Callable[..., bytes], stages: list[list[Path]], tmp_path: Path) -> Path:
    merge(tmp_path / "pulled", stages=[paths[:1] for paths in stages])
    return tmp_path / "pulled"


def test_replicas_are_their_mean_momentum_and_moments_included(
    merge: Callable[..., bytes], run: SignedManifest, replicas: list[Learner], tmp_path: Path
) -> None:
    to = tmp_path / "merged"
    merge(to, vectors=(*VECTORS, *OPTIMIZER_VECTORS))
    tensors = load_file(to / CHECKPOINT_NAME)
    layout = replicas[0].checkpoint.layout
    for vector in (*VECTORS, *OPTIMIZER_VECTORS):
        mean = torch.stack([replica.checkpoint.vectors()[vector] for replica in replicas]).double().mean(0).float()
        for name, expected in layout.views(mean).items():
            torch.testing.assert_close(tensors[f"{vector}/{name}"], expected, rtol=1e-6, atol=1e-12)
    read = read_folder(to)
    verify_hashes(read)
    assert read.signed.run_id == read.index.run_id == run.run_id
    assert (read.index.round, read.index.inner_steps, read.index.tokens) == (2, 12, replicas[0].totals.tokens)
    assert len(tensors) == (len(VECTORS) + len(OPTIMIZER_VECTORS)) * len(shapes_of(read.manifest.model))


def damage(path: Path, position: int = -5) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def cut_short(folder: Path) -> None:
    path = folder / CHECKPOINT_NAME
    path.write_bytes(path.read_bytes()[:-100])


def of_another_run(folder: Path) -> None:
    (folder / MANIFEST_NAME).write_bytes(manifest_for(MODELS["own"], seed=5).encode())


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: damage(folder / CHECKPOINT_NAME), "it is not what was written"),
        (lambda folder: damage(folder / INDEX_NAME), "no consolidated checkpoint"),
        (lambda folder: damage(folder / MANIFEST_NAME), "no consolidated checkpoint"),
        (cut_short, "not whole"),
        (of_another_run, "another run"),
        *((without(name), "cannot read") for name in (CHECKPOINT_NAME, INDEX_NAME)),
        (without(MANIFEST_NAME), "holds no model of a run: name a folder that"),
    ],
)
def test_what_is_wrong_with_a_folder_is_told(folder: Path, spoil: Callable[[Path], None], says: str) -> None:
    spoil(folder)
    with pytest.raises(ConsolidatedError, match=says):
        verify_hashes(read_folder(folder))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_file_with_a_value_that_is_not_finite_is_refused(folder: Path, tmp_path: Path, value: float) -> None:
    tensors = load_file(folder / CHECKPOINT_NAME)
    tensors["slow/norm.weight"][3] = value
    save_file(tensors, tmp_path / "bad.safetensors")
    with (
        open_tensors(tmp_path / "bad.safetensors") as file,
        pytest.raises(ConsolidatedError, match=r"slow/norm.weight holds a value that is not finite"),
    ):
        file.read("slow/norm.weight")


def test_checkpoints_of_other_runs_and_stages_are_not_merged(
    merge: Callable[..., bytes], stages: list[list[Path]], tmp_path: Path
) -> None:
    other = manifest_for({**MODELS["own"], "num_stages": 3}, seed=9)
    for change, says in (({"raw_manifest": other.encode()}, "another run"), ({"stages": stages[::-1]}, "has no slow/")):
        with pytest.raises(ConsolidatedError, match=says):
            merge(tmp_path / "a", **change)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_written_over(folder: Path, merge: Callable[..., bytes], tmp_path: Path) -> None:
    for to, says in (
        (folder, "there already"),
        (Path(), "no name for a new folder"),
        (Path(".."), "no name for a new folder"),
    ):
        with pytest.raises(ConsolidatedError, match=says):
            merge(to)
    (tmp_path / "empty").mkdir()
    merge(tmp_path / "empty")
    for written in (folder, tmp_path / "empty"):
        verify_hashes(read_folder(written))


def test_a_full_disk_is_told_before_anything_is_written_or_leaves_nothing(
    merge: Callable[..., bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage, limits = shutil.disk_usage(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000))
        with pytest.raises(ConsolidatedError, match=r"needs .* MB, and the disk has"):
            merge(tmp_path / "pulled")
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # writes beyond this size fail, as on a full disk
    try:
        with pytest.raises(ConsolidatedError, match="cannot write"):
            merge(tmp_path / "pulled")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return pulled(manifest_for({**MODELS["own"], "num_stages": 2}), tmp_path / "model").path


def test_resume_writes_a_manifest_that_starts_from_it(model_folder: Path, tmp_path: Path, cli: Cli) -> None:
    run_file = tmp_path / "more.toml"
    run_file.write_text('name = "more"\n[outer]\ncodec = "int8"\n')
    out = tmp_path / "new.manifest"
    resume = ("checkpoint", "resume", model_folder, run_file)
    code, said, _ = cli(*resume, "-o", out)
    assert code == Exit.OK
    manifest, signed = decode_manifest(out.read_bytes())
    assert manifest.start is not None
    assert manifest.start.checkpoint == read_folder(model_folder).id
    assert (manifest.name, manifest.model.num_stages, manifest.outer.codec) == ("more", 1, "int8")
    assert signed.run_id.hex() in said
    assert f"farandole join {out} --start {model_folder}" in said.replace("\n", " ")
    assert "there already" in cli(*resume, "-o", out)[2]
    run_file.write_text("model = '3M'")
    code, _, error = cli(*resume)
    assert (code, "more.toml: model: the checkpoint's is another one" in error) == (Exit.BAD_INPUT, True)


def test_a_model_goes_out_and_comes_in_again(model_folder: Path, tmp_path: Path, cli: Cli) -> None:
    export = ("checkpoint", "export", model_folder, "--to", tmp_path / "hf")
    assert "model.safetensors" in cli(*export)[1]
    assert cli(*export)[0] == Exit.BAD_INPUT
    run_file = tmp_path / "more.toml"
    run_file.write_text('name = "more"\n[model]\nnum_stages = 3\n[tokenizer]\nkind = "bytes"')
    to, out = tmp_path / "imported", tmp_path / "imported.manifest"
    code, _, told = cli("checkpoint", "import", tmp_path / "hf", run_file, "--to", to, "-o", out)
    assert (code, 'codec = "int8"' in told) == (Exit.OK, True)
    manifest, _ = decode_manifest(out.read_bytes())
    assert manifest.model.hf is not None
    assert manifest.model.num_stages == 3
    assert (manifest.outer.codec, manifest.inner) == ("int8", InnerConfig())
    verify_hashes(read_folder(to))


def test_where_a_model_cannot_go_is_said_before_a_dial(model_folder: Path, cli: Cli) -> None:
    nobody = f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id_of(b'n' * 32)}"
    pull = ("checkpoint", "pull", encode_invite(Invite(bytes(32), (nobody,))), "--no-mdns")
    for to, says in ((model_folder, "there already"), (Path(), "no name for a new folder")):
        code, _, said = cli(*pull, "--to", to)
        assert (code, says in said) == (Exit.BAD_INPUT, True)
        assert "dialling" not in said
