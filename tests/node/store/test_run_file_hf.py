"""A run file names a Hugging Face configuration; reading it needs neither torch nor transformers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from farandole.node.base.config.toml_file import read_toml
from farandole.node.store.run_file import MAX_CONFIG_BYTES, manifest_of, manifest_of_file
from farandole.protocol.run.families.gpt2 import GPT2Config
from farandole.protocol.run.families.llama import DefaultRope, LinearRope, Llama3Rope, LlamaConfig
from farandole.protocol.run.models import num_parameters
from farandole.protocol.wire.errors import ManifestError

from ...tokenizer_files import word_level

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
