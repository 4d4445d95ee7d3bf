from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.node.base.config.toml_file import read_toml
from farandole.node.store.run_file import MAX_CONFIG_BYTES, manifest_of, manifest_of_file
from farandole.protocol.run.families.gpt2 import GPT2Config
from farandole.protocol.run.families.llama import DefaultRope, LinearRope, Llama3Rope, LlamaConfig
from farandole.protocol.run.manifest import InnerConfig
from farandole.protocol.run.models import num_parameters
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
        ("[outer]\ncodec = 'int3'", "outer.codec: expected one of fp32, bf16, fp16, int8, int4, got"),
        ("[inner]\nbatch_size = '16'", 'inner.batch_size: expected a whole number, 1 to 65536, got "16"'),
        ("[inner]\nbeta1 = 1.5", "inner.beta1: expected a finite number, at least 0 and less than 1, got 1.5"),
        ("[rounds]\ninner_steps = 0\nround_seconds = 0", "rounds.inner_steps and rounds.round_seconds are both"),
        ("[dta]\nsource = 'text'", "dta is no section; did you mean data?"),
        ("[start]\nid = 'x'", "start.id: expected 64 hexadecimal digits, small letters, in quotes, got"),
        ("slow = 2", "slow is no setting; the file may have name, "),
        ("[rounds]\nouter.alpha = 0.3", "rounds.outer is no section; [rounds] may have "),
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


# Original configurations: https://huggingface.co/openai-community/gpt2, and Llama 3.2 1B.
GPT2: dict[str, Any] = json.loads("""{
  "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
  "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
  "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
  "resid_pdrop": 0.1, "summary_activation": null, "summary_first_dropout": 0.1, "summary_proj_to_labels": true,
  "summary_type": "cls_index", "summary_use_proj": true,
  "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}}, "vocab_size": 50257
}""")
LLAMA: dict[str, Any] = json.loads("""{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000,
  "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
  "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
  "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
  "rms_norm_eps": 1e-05,
  "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3"},
  "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
  "transformers_version": "4.45.0.dev0", "use_cache": true, "vocab_size": 128256
}""")


def hf_of(settings: dict[str, Any]) -> LlamaConfig | GPT2Config:
    hf = manifest_of({"name": "a", "model": {"hf": settings}}, Path(), 0).model.hf
    assert hf is not None
    return hf


def test_a_run_file_names_a_configuration_or_its_folder(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA))
    manifests = []
    for name in ("llama/config.json", "llama"):
        path = tmp_path / "run.toml"
        path.write_text(f'name = "a"\nmodel = {{ hf = "{name}", num_stages = 3, context = 128 }}')
        manifests.append(manifest_of_file(read_toml(path), now=0))
    assert manifests[0] == manifests[1]
    model = manifests[0].model
    assert (model.num_layers, model.width, model.num_heads, model.hidden, model.vocabulary) == (
        *(16, 2_048, 32, 8_192, 128_256),
    )
    assert (model.num_stages, model.context) == (3, 128)
    assert num_parameters(manifests[0].model) == 1_235_814_400  # as in its model card


@pytest.mark.parametrize("is_absolute", [False, True])
def test_a_configurations_folder_may_have_the_tokenizer_wherever_the_run_file_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_absolute: bool
) -> None:
    folder = tmp_path / "runs" / "llama"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "tokenizer.json").write_bytes(word_level("a"))
    named = folder if is_absolute else "llama"
    (tmp_path / "runs" / "run.toml").write_text(f'name = "a"\nmodel = "hf:{named}"')
    monkeypatch.chdir(tmp_path)
    tokenizer = manifest_of_file(read_toml(Path("runs", "run.toml")), now=0).tokenizer
    assert (tokenizer.kind, tokenizer.sha256) == ("tokenizers", hashlib.sha256(word_level("a")).hexdigest())


def test_gpt2_as_it_comes() -> None:
    model = manifest_of({"name": "a", "model": {"hf": GPT2}}, Path(), 0).model
    assert model.hf == GPT2Config(
        vocab_size=50_257, n_embd=768, n_inner=3_072, n_layer=12, n_head=12, n_positions=1_024
    )
    assert model.context == 1_024
    assert num_parameters(model) == 124_439_808  # called 117M in its paper


def test_what_is_left_out_is_derived_as_transformers_does() -> None:
    small = {"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64}
    settings = hf_of({**small, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": None})
    assert isinstance(settings, LlamaConfig)
    assert (settings.num_key_value_heads, settings.head_dim, settings.tie_word_embeddings) == (4, 8, False)
    assert settings.rope_parameters == DefaultRope(rope_theta=10_000.0)


def test_rotary_embeddings_as_any_version_writes_them() -> None:
    def rope(**settings: object) -> object:
        plain = {name: value for name, value in LLAMA.items() if not name.startswith("rope")}
        hf = hf_of({**plain, **settings})
        assert isinstance(hf, LlamaConfig)
        return hf.rope_parameters

    assert rope(rope_theta=5e5, rope_scaling=None) == DefaultRope(rope_theta=5e5)
    assert rope(rope_theta=500_000, rope_scaling={"type": "linear", "factor": 2}) == LinearRope(2.0, rope_theta=5e5)
    assert rope(rope_theta=5e5, rope_scaling=LLAMA["rope_scaling"]) == Llama3Rope(32.0, 1.0, 4.0, 8_192, rope_theta=5e5)
    assert rope(rope_parameters={"rope_theta": 7.0, "rope_type": "default"}) == DefaultRope(rope_theta=7.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "its content as a table"),
        (b"{}" + b" " * MAX_CONFIG_BYTES, "no configuration"),
        (b'{"model_type": "llama", "x": {"y": [1, 2]}}', "missing|is no section"),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ManifestError, match=message):
        manifest_of({"name": "a", "model": {"hf": "config.json"}}, tmp_path, 0)


@pytest.mark.parametrize("hf", ["nowhere.json", 3])
def test_what_is_not_there_or_no_table_is_refused(tmp_path: Path, hf: object) -> None:
    with pytest.raises(ManifestError, match=r"model\.hf"):
        manifest_of({"name": "a", "model": {"hf": hf}}, tmp_path, 0)
