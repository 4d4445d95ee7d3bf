"""A run created from a model, in Python."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import farandole
from farandole.node.base.identity import locked
from farandole.node.base.settings import NodeSettings
from farandole.node.own_loop.child_node import await_node
from farandole.node.store.consolidated.folder import read_folder, verify_hashes
from farandole.protocol.run.invite import Invite, encode_invite
from farandole.protocol.run.own_model import expanded, recipe_hash
from farandole.protocol.wire.errors import ManifestError
from farandole.protocol.wire.identity import peer_id_of
from farandole.training.cluster.external import ExternalEngine, Loop, Turns

from ...patience import PATIENCE
from ..small_runs import small_manifest, write_run


def a_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).bfloat16()
    model[2].requires_grad_(False)
    return model


@pytest.mark.parametrize("with_frozen", [False, True])
def test_a_run_starts_from_the_models_weights(tmp_path: Path, with_frozen: bool) -> None:
    model = a_model()
    folder = farandole.create_run(
        model, tmp_path / "run", recipe="batches of 8", with_frozen=with_frozen, outer={"codec": "int8"}
    )
    made = read_folder(folder / "start")
    verify_hashes(made)
    manifest = made.manifest
    with pytest.raises(ManifestError, match="has a run already"):
        farandole.create_run(model, folder)
    assert manifest.rounds.overlap
    assert manifest.outer.codec == "int8"
    assert manifest.start is not None
    assert manifest.start.checkpoint == made.id
    assert manifest.model.external is not None
    assert manifest.model.external.recipe == recipe_hash("batches of 8")
    names = ["0.weight", "0.bias", "1.weight", "1.bias"] + ["2.weight", "2.bias"] * with_frozen
    assert list(expanded(manifest.model.external.parameters)) == names
    assert b"base" not in made.signed.body, "releases that know no base read a run without one"

    other = a_model()
    engine = ExternalEngine(Loop(other), manifest, Turns(), run_id=made.signed.run_id)
    engine.checkpoint.start_from(made.checkpoint, 0, 0)
    shared = model.state_dict() if with_frozen else {name: dict(model.named_parameters())[name] for name in names}
    for name in names:
        assert torch.equal(other.get_parameter(name), shared[name])
    assert torch.equal(other.get_parameter("2.weight"), model.get_parameter("2.weight")) == with_frozen


def test_a_model_of_too_many_parameters_is_refused_by_name_and_number(tmp_path: Path) -> None:
    many = nn.ModuleList(nn.Linear(1, 1 + number % 2) for number in range(2_500))  # no two layers are equal
    with pytest.raises(ManifestError, match="shapes of 5000 parameters"):
        farandole.create_run(many, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_that_cannot_be_averaged_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    damaged: Any = nn.Linear(2, 2)
    with torch.no_grad():
        damaged.bias[1] = torch.nan
    models: list[tuple[Any, str]] = [
        (damaged, "bias has values that are not finite"),
        (nn.Linear(2, 2, dtype=torch.complex64), "weight is torch.complex64"),
        (nn.Linear(2, 2, device="meta"), "weight has no values"),
        (nn.LazyLinear(2), "weight has no shape yet"),
        (nn.Linear(2, 2).requires_grad_(False), "with_frozen=True"),
        (nn.ModuleDict({"größe": nn.Linear(2, 2)}), "größe.weight"),
        ([nn.Linear(2, 2)], "a list is no torch.nn.Module"),
    ]
    for model, words in models:
        with pytest.raises(farandole.FarandoleError, match=words):
            farandole.create_run(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_run_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ManifestError, match="no invite"):
        farandole.NoLoCo(model, optimizer, "nowhere")
    with pytest.raises(ManifestError, match="invite"):
        farandole.NoLoCo(model, optimizer, "farandole1abc")
    # A file system's names have at most 255 bytes, and invites may be longer.
    long = encode_invite(
        Invite(bytes(32), tuple(f"/ip4/192.0.2.{part}/tcp/4001/p2p/{peer_id_of(bytes(32))}" for part in range(4)))
    )
    assert len(long) > 255
    assert farandole.NoLoCo(model, optimizer, long, options=["--port", "0", "--home=other"]).home == Path("other")
    with pytest.raises(ManifestError, match="no invite"):
        farandole.NoLoCo(model, optimizer, long[1:])
    with pytest.raises(farandole.FarandoleError, match=r"a list is no torch\.optim\.Optimizer"):
        farandole.NoLoCo(model, [optimizer], long)  # type: ignore[arg-type]  # which is refused
    farandole.create_run(model, "farandole1abc")
    assert farandole.NoLoCo(model, optimizer, "farandole1abc").home == Path("farandole1abc")


def test_what_is_wrong_is_said_before_anything_is_written(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for sections, message in (
        ({"rounds": {"round_second": 3}}, "rounds.round_second is no setting; did you mean round_seconds?"),
        ({"colour": "red"}, "colour"),
        ({"inner": {"batch_size": 2}}, "own loop chooses its text"),
    ):
        with pytest.raises(ManifestError, match=re.escape(message)):
            farandole.create_run(model, tmp_path / "new", **sections)
    assert not (tmp_path / "new").exists()


def test_a_loop_says_what_its_node_lacks(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ManifestError, match=r"which run.* knows none: give run= an invite"):
        farandole.NoLoCo(model, optimizer, options=["--home", str(tmp_path / "new")])
    home = farandole.create_run(model, tmp_path / "run")
    loop = farandole.NoLoCo(model, optimizer, run=home, options=["--upload-mbit", "fast"])
    with pytest.raises(farandole.NodeError, match=r"Invalid value for '--upload-mbit'.*its output is in"), loop:
        pass


def test_a_runs_model_has_the_seeds_weights_and_computes_the_loss(tmp_path: Path) -> None:
    write_run(tmp_path, small_manifest(seed=3))
    one, same = (farandole.model_of(tmp_path / "run.manifest") for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(one.parameters(), same.parameters(), strict=True))
    tokens = torch.zeros(2, 8, dtype=torch.long)
    assert one(tokens).shape == (2, 8, 256)
    assert one(tokens, tokens).shape == ()


def test_a_run_whose_model_a_loop_cannot_train_so_is_refused(tmp_path: Path) -> None:
    own = read_folder(farandole.create_run(nn.Linear(2, 2), tmp_path / "own") / "start")
    (tmp_path / "own.manifest").write_bytes(own.signed.encode())
    write_run(tmp_path, small_manifest(data={"epochs": 2}))
    for name, words in (("own", "other members"), ("run", "data.epochs")):
        with pytest.raises(ManifestError, match=words):
            farandole.model_of(tmp_path / f"{name}.manifest")


def test_without_a_run_there_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="knows no run: farandole join INVITE"):
        farandole.model_of(home=tmp_path)
    with pytest.raises(ManifestError, match="is no manifest that can be read"):
        farandole.model_of(tmp_path / "nothing")


def test_a_node_that_starts_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a loop on the same machine would start a second node, in another folder."""
    holds, looked, events = threading.Event(), threading.Event(), list[str]()

    def start() -> None:  # and fail
        with locked(NodeSettings(home=tmp_path).lock):
            holds.set()
            assert looked.wait(PATIENCE)
            events.append("ended")

    def pause(seconds: float) -> None:  # between two looks
        looked.set()
        thread.join(PATIENCE)

    monkeypatch.setattr("farandole.node.own_loop.child_node.time.sleep", pause)
    thread = threading.Thread(target=start)
    thread.start()
    assert holds.wait(PATIENCE)
    assert await_node(tmp_path) == ""
    events.append("waited")
    thread.join()

    assert events == ["ended", "waited"]


def test_a_folder_without_a_node_is_not_waited_for(tmp_path: Path) -> None:
    assert await_node(tmp_path / "new") == ""
    with locked(NodeSettings(home=tmp_path).lock):
        pass
    assert await_node(tmp_path) == ""
    assert not (tmp_path / "new").exists()
