from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.node.base.config.toml_file import read_toml
from farandole.node.store.run_file import manifest_of, manifest_of_file
from farandole.protocol.run.manifest import InnerConfig
from farandole.protocol.run.rules import GuardConfig
from farandole.protocol.wire.errors import ManifestError

from ...tokenizer_files import word_level
from ..small_runs import MODEL, TINY

EXAMPLE = Path(__file__).parents[3] / "examples" / "run.toml"


def test_the_example_names_every_setting() -> None:
    manifest = manifest_of_file(read_toml(EXAMPLE), now=1_000.9)
    assert manifest.name == "my first run"
    assert manifest.created_at == 1_000
    assert manifest.model.width == 192
    assert manifest.inner.total_steps == 10_000
    text = EXAMPLE.read_text()
    assert [name for name in (*InnerConfig.__struct_fields__, "exchange_seconds", "gamma") if name not in text] == []


def test_a_model_by_name_by_table_and_by_both() -> None:
    assert manifest_of({"name": "a", "model": TINY}, Path(), 0).model == MODEL
    longer = manifest_of({"name": "a", "model": {"preset": "tiny", "context": 999}}, Path(), 0).model
    assert (longer.width, longer.context) == (32, 999)


def test_the_schedule_may_be_in_tokens_of_one_member() -> None:
    inner = {"warmup_tokens": 10_240, "total_tokens": 1e6, "batch_size": 8}
    manifest = manifest_of({"name": "a", "model": "tiny", "inner": inner}, Path(), 0)
    assert manifest.model.context * 8 == 512
    assert (manifest.inner.warmup_steps, manifest.inner.total_steps) == (20, 1_953)
    least = manifest_of({"name": "a", "model": "tiny", "inner": {"total_tokens": 1}}, Path(), 0)
    assert least.inner.total_steps == 1


def test_a_tokenizer_file_is_known_by_its_hash(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(word_level("a", "b"))
    settings = {"name": "a", "model": "tiny", "tokenizer": {"file": "tokenizer.json"}}
    tokenizer = manifest_of(settings, tmp_path, 0).tokenizer
    assert (tokenizer.kind, tokenizer.sha256) == ("tokenizers", hashlib.sha256(word_level("a", "b")).hexdigest())
    with pytest.raises(ManifestError, match=r"cannot read .*tokenizer\.json"):
        manifest_of(settings, tmp_path / "elsewhere", 0)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"# farandole", "tokenizer.file: .* is no tokenizer file"),
        (word_level(*map(str, range(257))), "has 257 tokens, and the model 256: set model.vocabulary = 257"),
    ],
)
def test_a_tokenizer_with_which_no_node_could_train_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ManifestError, match=says):
        manifest_of({"name": "a", "model": "tiny", "tokenizer": {"file": "tokenizer.json"}}, tmp_path, 0)


def fault(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "run.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ManifestError) as caught:
        manifest_of_file(read_toml(path), now=0)
    return str(caught.value).removeprefix(f"{path}: ")


@pytest.mark.parametrize(
    ("text", "begin"),
    [
        ("[outer]\ngama = 0.7", "outer.gama is no setting; did you mean gamma?"),
        ("[outer]\ncodec = 'int3'", "outer.codec: expected one of fp32, bf16, fp16, int8, int4, topk, got"),
        ("[inner]\nbatch_size = '16'", 'inner.batch_size: expected a whole number, 1 to 65536, got "16"'),
        ("[inner]\nbeta1 = 1.5", "inner.beta1: expected a finite number, at least 0 and less than 1, got 1.5"),
        ("[rounds]\ninner_steps = 0\nround_seconds = 0", "rounds.inner_steps and rounds.round_seconds are both"),
        ("[dta]\nsource = 'text'", "dta is no section; did you mean data?"),
        ("[start]\nid = 'x'", "start.id: expected 64 hexadecimal digits, small letters, in quotes, got"),
        ("slow = 2", "slow is no setting; the file may have name, "),
        ("[rounds]\nouter.topk = 32", "rounds.outer is no section; [rounds] may have "),
        ("admission = [\n  'x',\n  3,\n]", "admission[1]: expected a text in quotes"),
        ("admission = 'opne'", "admission: expected one of open, invited or a list in brackets"),
        ("outer = 'noloco'", "outer: expected a section, got"),
        ("[inner]\ntotal_tokens = 1\ntotal_steps = 2", "inner.total_tokens and inner.total_steps say the same"),
        ("[inner]\ntotal_tokens = 0", "inner.total_tokens is 0: a positive number"),
        ("[inner]\nwarmup_tokens = true", "inner.warmup_tokens is true"),
        ("[inner]\nbatch_size = 'x'\ntotal_tokens = 9", "inner.batch_size"),
    ],
)
def test_a_fault_is_named_with_what_would_be_right(tmp_path: Path, text: str, begin: str) -> None:
    assert fault(tmp_path, f"name = 'a'\nmodel = 'tiny'\n{text}\n").startswith(begin)


@pytest.mark.parametrize(
    ("model", "begin"),
    [
        ("model = 'tinny'", "model: no preset is called 'tinny'; there are tiny, 0.5M, "),
        ("model = 3", "model: expected a preset (tiny, 0.5M"),
        ("modle = 'tiny'", "modle is no setting; did you mean model?"),
        ("[model]\nprest = 'tiny'", "model.prest is no setting; did you mean preset?"),
        ("[model]\nnum_stages = 4", 'model: say which: preset = "3M", or its sizes'),
        ("[model]\nown = 'a.b:c'\ncontext = 'x'", "model.context: expected a whole number, 8 to"),
        ("[model]\nown = 'a.b:c'\nwidth = 'x'", "model.width: what a.b:c returns decides on it"),
        ("model = 'tiny'\n[tokenizer]\nfile = 'no.json'", "tokenizer.file: cannot read"),
        (
            "name = 'a'\n[model]\npreset = 'tiny'\nnum_stages = 2\n[rounds]\nround_seconds = 9\n[data]\n"
            "mask_documents = true",
            "data.mask_documents and model.num_stages exclude each other",
        ),
    ],
)
def test_a_fault_of_the_model_is_too(tmp_path: Path, model: str, begin: str) -> None:
    assert fault(tmp_path, f"{model}\n").startswith(begin)


def test_all_relations_that_fail_are_named_at_once(tmp_path: Path) -> None:
    text = "model = {preset = 'tiny', num_stages = 9}\n[outer]\ngamma = 1.9\n[inner]\nlearning_rate = inf"
    found = fault(tmp_path, f"name = 'a'\n{text}\n").splitlines()
    assert len(found) == 3
    for begin in ("model.num_stages is 9", "outer.gamma is 1.9", "inner.learning_rate is inf"):
        assert sum(begin in line for line in found) == 1


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"name = 'a'\nmodel = 3M\n", "this is not TOML: Expected newline"),
        (b"name = 'a'\nmodel = '\xff'\n", "this is not TOML: a character in line 2 is not UTF-8"),
        (b"name = " + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_run_file_is_refused(tmp_path: Path, content: bytes, line: str) -> None:
    found = fault(tmp_path, content)
    assert line in found
    if "TOML: " in line and "UTF" not in line:
        assert "A text needs quotes" in found


GOOD = tomllib.loads(EXAMPLE.read_text()) | {"model": {"preset": "tiny"}, "screening": {"kind": "guard", "radius": 2.0}}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@given(st.data())
def test_any_other_value_is_valid_or_a_fault_that_names_it(data: st.DataObject) -> None:
    section, value = data.draw(st.sampled_from(sorted(GOOD))), data.draw(VALUES)
    settings: dict[str, Any] = {**GOOD, section: value}
    if isinstance(GOOD[section], dict) and data.draw(st.booleans()):
        settings[section] = {**GOOD[section], data.draw(st.sampled_from([*sorted(GOOD[section]), "new"])): value}
    found = section
    try:
        manifest_of(settings, Path("no such folder"), 0)
    except ManifestError as error:
        found = str(error)
    assert section in found


def test_a_section_about_screening_without_a_kind_is_about_the_guard() -> None:
    values = tomllib.loads("name = 'run'\nmodel = 'tiny'\n[screening]\nmax_loss_increase = 0.01")
    assert manifest_of(values, Path(), 0).screening == GuardConfig(max_loss_increase=0.01)
