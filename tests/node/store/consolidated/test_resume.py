"""A run that starts from a checkpoint, and models that come from transformers or go there: they compute the same."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from farandole.node.store.consolidated.folder import Consolidated, consolidate, read_folder
from farandole.node.store.consolidated.hf_folder import export_hf
from farandole.node.store.consolidated.resume import import_model, resumed_manifest
from farandole.node.store.consolidated.tensors import ConsolidatedError
from farandole.protocol.run.manifest import (
    EpochsConfig,
    Manifest,
    SignedManifest,
    decode_body,
    decode_manifest,
    sign_manifest,
)
from farandole.protocol.run.rules import OPTIMIZER_VECTORS
from farandole.protocol.wire.errors import ManifestError
from farandole.training.engine.learner import Learner

from ....tokenizer_files import SEPARATOR, word_level, write_words
from .runs import GPT2, KEY, LLAMA, MODELS, VECTORS, assert_same_logits, manifest_for, pulled, save_stages, trained

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")


@pytest.fixture(scope="module", params=list(MODELS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Consolidated:
    signed = manifest_for({**MODELS[request.param], "num_stages": 3}, seed=4)
    return pulled(signed, tmp_path_factory.mktemp("run") / "pulled", trained(signed, b"a" * 32, steps=2))


def resumed(folder: Consolidated, settings: dict[str, Any]) -> Manifest:
    return resumed_manifest(folder, settings, Path(), 1_000)


def test_what_a_run_file_leaves_out_is_as_it_was(folder: Consolidated) -> None:
    after = resumed(folder, {"name": "b", "model": {"num_stages": 2}, "inner": {"total_steps": 900}})
    before = folder.manifest
    assert after.start is not None
    assert (after.start.checkpoint, after.start.run) == (folder.id, folder.signed.run_id)
    assert (after.start.inner_steps, after.start.tokens) == (4, folder.index.tokens)
    assert (after.name, after.model.num_stages, after.inner.total_steps, after.created_at) == ("b", 2, 900, 1_000)
    assert (after.inner.learning_rate, after.seed) == (before.inner.learning_rate, 4)
    assert resumed(folder, {}).model.num_stages == 1


EPOCHS = EpochsConfig(run_id="ab" * 32, corpus="cd" * 8, epoch=1, done="ff07")


def test_epochs_of_the_data_go_on_where_they_were_or_begin_anew_where_slices_are_others(tmp_path: Path) -> None:
    signed = manifest_for(MODELS["own"], data={"epochs": 3})
    folder = pulled(signed, tmp_path / "pulled", trained(signed, b"a" * 32, steps=0), EPOCHS)
    assert folder.epochs == EPOCHS
    after = resumed(folder, {"model": {"num_stages": 2}})
    assert after.start is not None
    assert after.start.epochs == EPOCHS
    assert after.slice_order(bytes(32)) == bytes.fromhex(EPOCHS.run_id)
    assert decode_manifest(sign_manifest(after, KEY).encode())[0] == after
    for settings in ({"inner": {"batch_size": 4}}, {"data": {"epochs": 0}}, {"data": {"held_out": 0.1}}):
        after = resumed(folder, settings)
        assert after.start is not None
        assert after.start.epochs is None
    with pytest.raises(ManifestError, match="so many are done"):
        resumed(folder, {"data": {"epochs": 1}})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model": "0.5M"}, "the checkpoint's is another one"),
        ({"tokenizer": {"kind": "tokenizers", "sha256": "ab" * 32}}, "tokenizer: the checkpoint was made with another"),
        ({"inner": {"learning_rate": -1.0}}, "inner.learning_rate"),
    ],
)
def test_another_model_or_tokenizer_is_refused(folder: Consolidated, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ManifestError, match=says):
        resumed(folder, settings)


# Imported models


def saved_by_transformers(config: dict[str, Any], path: Path, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(3)
    rest = {name: value for name, value in config.items() if name != "model_type"}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(config["model_type"], **rest), dtype=dtype
    )
    model.save_pretrained(path, max_shard_size="20KB" if dtype is torch.float16 else "5GB")
    return model.eval()  # without dropout


def imported(tmp_path: Path, **settings: Any) -> tuple[Manifest, Consolidated]:
    """Import the model in the folder ``theirs``."""
    run = {"name": "a", **settings}
    _, signed = import_model(tmp_path / "theirs", run, tmp_path, tmp_path / "ours", KEY, 0)
    manifest = decode_body(signed.body)
    ours = read_folder(tmp_path / "ours")
    assert manifest.start is not None
    assert (ours.id, ours.signed) == (manifest.start.checkpoint, signed)
    return manifest, ours


def test_the_folder_says_which_model_it_is(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="no more than how it is cut"):
        imported(tmp_path, model="tiny")


@pytest.mark.parametrize(
    "config", [LLAMA, {**LLAMA, "tie_word_embeddings": True}, GPT2], ids=["llama", "llama-tied", "gpt2"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_imported_model_is_the_same_and_goes_out(config: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    model = saved_by_transformers(config, tmp_path / "theirs", dtype)
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists() == (dtype is torch.float16)
    manifest, ours = imported(tmp_path, model={"num_stages": 2, "context": 16})
    assert manifest.start is not None
    assert (manifest.start.run, manifest.start.inner_steps, manifest.model.num_stages) == (bytes(32), 0, 2)
    assert all(name.startswith("slow/") for name in load_file(ours.checkpoint))

    export_hf(ours, tmp_path / "back")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, model.float()(tokens).logits, rtol=0, atol=1e-5)
    # and a run may go on from it under another cut
    assert resumed(ours, {"name": "b", "model": {"num_stages": 3}}).model.num_stages == 3


def test_old_files_without_the_models_prefix_are_read(tmp_path: Path) -> None:
    saved_by_transformers(GPT2, tmp_path / "theirs")
    path = tmp_path / "theirs" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 32, 32).tril()
    save_file(tensors, path)
    kept = load_file(imported(tmp_path)[1].checkpoint)
    assert torch.equal(kept["slow/transformer.h.2.mlp.c_fc.weight"], tensors["h.2.mlp.c_fc.weight"])
    assert not any(".attn.bias" in name for name in kept)


def test_a_tokenizer_beside_the_weights_is_the_runs(tmp_path: Path) -> None:
    saved_by_transformers(GPT2, tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").write_bytes(word_level("a"))
    assert imported(tmp_path)[0].tokenizer.kind == "tokenizers"


def header(entries: object) -> bytes:
    raw = json.dumps(entries).encode()
    return len(raw).to_bytes(8, "little") + raw


_MATRIX = "transformer.h.0.attn.c_attn.weight"
_INDEX = json.dumps({"weight_map": {"a": "../../secret.safetensors"}}).encode()
_MANY = json.dumps({"weight_map": {str(at): f"{at}.safetensors" for at in range(1_025)}}).encode()


@pytest.mark.parametrize(
    ("spoilt", "says"),
    [
        (None, f"has no weights {_MATRIX}"),
        (torch.zeros(3, 3), r"has the shape \(3, 3\)"),
        (torch.full((32, 96), float("nan")), "not finite"),
        (torch.zeros(32, 96, dtype=torch.int8), "is I8, not F32"),
        (b"", "no safetensors file"),
        ((2**63).to_bytes(8, "little"), "no safetensors file"),
        (header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}), "not whole"),
        (header({"a": {"dtype": "F32", "shape": [2**40] * 8, "data_offsets": [0, 16]}}), "no safetensors file"),
        (header([1]), "no safetensors file"),
        ((60_000).to_bytes(8, "little") + b"[" * 60_000, "no safetensors file"),
        (_INDEX, "says not which file"),
        (_MANY, "says not which file"),
    ],
)
def test_weights_that_are_not_the_configurations_and_hostile_files_are_refused(
    spoilt: torch.Tensor | bytes | None, says: str, tmp_path: Path
) -> None:
    """The spoilt are one of the weights, or the file of all, or an index that leads out of its folder."""
    saved_by_transformers(GPT2, tmp_path / "theirs")
    path = tmp_path / "theirs" / "model.safetensors"
    if isinstance(spoilt, bytes):
        spoils_index = spoilt in (_INDEX, _MANY)
        (path.with_name("model.safetensors.index.json") if spoils_index else path).write_bytes(spoilt)
    else:
        weights = {**load_file(path), _MATRIX: spoilt}
        save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, path)
    with pytest.raises(ConsolidatedError, match=says):
        imported(tmp_path)
    assert os.listdir(tmp_path) == ["theirs"]


TOKENS = torch.arange(2 * 16).view(2, 16) * 37 % 256
VARIANTS: dict[str, dict[str, Any]] = {
    **MODELS,
    "llama-tied": {"hf": {**LLAMA, "tie_word_embeddings": True, "rope_scaling": None, "num_key_value_heads": 4}},
    "gpt2-untied": {"hf": {**GPT2, "tie_word_embeddings": False}},
}


def exported(signed: SignedManifest, learner: Learner | None, folder: Path, **options: Any) -> Path:
    export_hf(pulled(signed, folder / "pulled", learner), folder / "hf", **options)
    return folder / "hf"


@pytest.mark.parametrize("name", VARIANTS)
def test_transformers_computes_the_same_logits(name: str, tmp_path: Path) -> None:
    signed = manifest_for({**VARIANTS[name], "context": 16, "num_stages": 2})
    learner = trained(signed, b"a" * 32)
    folder = exported(signed, learner, tmp_path)
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    assert model(TOKENS).logits.std() > 0.01
    assert_same_logits(model, learner.replica.module, TOKENS)
    generated = model.generate(TOKENS[:1, :4], max_new_tokens=4, do_sample=False)
    assert generated.shape[1] > 4


def test_bytes_are_tokens_for_transformers_as_well(tmp_path: Path) -> None:
    folder = exported(manifest_for(MODELS["own"]), None, tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "Voilà: naïve\n\ttabs, “quotes”, Ā and 🜲  spaces \x00 "
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert len(tokenizer) == 256
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 0


def test_the_optimizers_state_is_no_hindrance(tmp_path: Path) -> None:
    signed = manifest_for(MODELS["own"])
    stages = save_stages(trained(signed, b"a" * 32, steps=1, rounds=1), signed, tmp_path, "replica")
    consolidate(tmp_path / "pulled", KEY, signed.encode(), [stages], (*VECTORS, *OPTIMIZER_VECTORS))
    assert "model.safetensors" in export_hf(read_folder(tmp_path / "pulled"), tmp_path / "hf")


def test_a_tokenizer_file_goes_along_if_it_is_the_runs(tmp_path: Path) -> None:
    path, config = write_words(tmp_path, SEPARATOR, *map(chr, range(1, 256)))
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "run").mkdir()
    signed = manifest_for(MODELS["own"])
    learner = trained(signed, b"a" * 32, steps=1, rounds=1)
    named = manifest_for(MODELS["own"], tokenizer={"kind": "tokenizers", "sha256": config.sha256})
    learner.checkpoint.run_id = named.run_id
    folder = exported(named, learner, tmp_path / "run", tokenizer=path)
    assert (folder / "tokenizer.json").read_bytes() == path.read_bytes()
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    assert loaded.eos_token == SEPARATOR
    model = read_folder(tmp_path / "run" / "pulled")
    with pytest.raises(ConsolidatedError, match="is not the run's tokenizer"):
        export_hf(model, tmp_path / "no", tmp_path / "other.json")
    export_hf(model, tmp_path / "without")
    assert not (tmp_path / "without" / "tokenizer.json").exists()
