from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from farandole.node.store.run_file import MAX_RUN_FILE_BYTES, load_run_file, manifest_of
from farandole.protocol.errors import ManifestError
from farandole.protocol.manifest import InnerConfig, ModelConfig

EXAMPLE = Path(__file__).parents[3] / "examples" / "run.toml"


def test_the_example_names_every_setting() -> None:
    manifest = load_run_file(EXAMPLE, now=1_000.9)
    assert manifest.name == "my first run"
    assert manifest.created_at == 1_000
    assert manifest.model.width == 192
    assert manifest.inner.total_steps == 10_000
    text = EXAMPLE.read_text()
    assert [name for name in (*InnerConfig.__struct_fields__, "exchange_seconds", "gamma") if name not in text] == []


def test_a_model_by_name_by_table_and_by_both() -> None:
    model = ModelConfig(num_layers=1, width=16, num_heads=2, hidden=32, context=16, vocabulary=256)
    table = {"num_layers": 1, "width": 16, "num_heads": 2, "hidden": 32, "context": 16, "vocabulary": 256}
    assert manifest_of({"name": "a", "model": table}, Path(), 0).model == model
    longer = manifest_of({"name": "a", "model": {"preset": "tiny", "context": 999}}, Path(), 0).model
    assert (longer.width, longer.context) == (32, 999)


def test_a_tokenizer_file_is_known_by_its_hash(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    settings = {"name": "a", "model": "tiny", "tokenizer": {"file": "tokenizer.json"}}
    tokenizer = manifest_of(settings, tmp_path, 0).tokenizer
    assert (tokenizer.kind, tokenizer.sha256) == ("tokenizers", hashlib.sha256(b"{}").hexdigest())
    with pytest.raises(ManifestError, match=r"cannot read .*tokenizer\.json"):
        manifest_of(settings, tmp_path / "elsewhere", 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "is not TOML"),
        ("name = 'a'", "model is missing: name a preset"),
        ("name = 'a'\nmodel = '7B'", "no preset is called '7B'; there are tiny"),
        ("name = 'a'\nmodel = 'tiny'\ncolour = 1", "colour"),
        ("name = 'a'\nmodel = 'tiny'\n[outer]\ngamma = 1.9", r"outer\.gamma is 1\.9"),
        ("name = 'a'\nmodel = 'tiny'\n[inner]\nbatch_size = '16'", r"inner\.batch_size"),
        ("name = 'a'\nmodel = 3", r"model"),
        ("#" * MAX_RUN_FILE_BYTES + "#", "no run file"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ManifestError, match=message):
        load_run_file(path, now=0)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="cannot read"):
        load_run_file(tmp_path / "run.toml", now=0)
