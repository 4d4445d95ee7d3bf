"""``farandole checkpoint`` as users type it: its output, the files that it writes, and its exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.node.base.exits import Exit
from farandole.node.store.consolidated.folder import read_folder, verify_hashes
from farandole.protocol.run.invite import Invite, encode_invite
from farandole.protocol.run.manifest import InnerConfig, decode_manifest
from farandole.protocol.wire.identity import peer_id_of

from ...conftest import Cli
from .runs import MODELS, manifest_for, pulled


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return pulled(manifest_for({**MODELS["own"], "num_stages": 2}), tmp_path / "model").path


def test_resume_writes_a_manifest_that_starts_from_it(folder: Path, tmp_path: Path, cli: Cli) -> None:
    run_file = tmp_path / "more.toml"
    run_file.write_text('name = "more"\n[outer]\ncodec = "int8"\n')
    out = tmp_path / "new.manifest"
    resume = ("checkpoint", "resume", folder, run_file)
    code, said, _ = cli(*resume, "-o", out)
    assert code == Exit.OK
    manifest, signed = decode_manifest(out.read_bytes())
    assert manifest.start is not None
    assert manifest.start.checkpoint == read_folder(folder).id
    assert (manifest.name, manifest.model.num_stages, manifest.outer.codec) == ("more", 1, "int8")
    assert signed.run_id.hex() in said
    assert f"farandole join {out} --start {folder}" in said.replace("\n", " ")
    assert "there already" in cli(*resume, "-o", out)[2]
    run_file.write_text("model = '3M'")
    code, _, error = cli(*resume)
    assert (code, "more.toml: model: the checkpoint's is another one" in error) == (Exit.BAD_INPUT, True)


def test_a_model_goes_out_and_comes_in_again(folder: Path, tmp_path: Path, cli: Cli) -> None:
    export = ("checkpoint", "export", folder, "--to", tmp_path / "hf")
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


def test_where_a_model_cannot_go_is_said_before_a_dial(folder: Path, cli: Cli) -> None:
    nobody = f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id_of(b'n' * 32)}"
    pull = ("checkpoint", "pull", encode_invite(Invite(bytes(32), (nobody,))), "--no-mdns")
    for to, says in ((folder, "there already"), (Path(), "no name for a new folder")):
        code, _, said = cli(*pull, "--to", to)
        assert (code, says in said) == (Exit.BAD_INPUT, True)
        assert "dialling" not in said
