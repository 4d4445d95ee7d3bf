"""transformers loads exported models, and they compute the same as the models here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from farandole.node.store.consolidated.folder import consolidate, read_folder
from farandole.node.store.consolidated.hf_folder import export_hf
from farandole.node.store.consolidated.tensors import ConsolidatedError
from farandole.protocol.run.manifest import SignedManifest
from farandole.protocol.run.rules import OPTIMIZER_VECTORS
from farandole.training.engine.learner import Learner

from ....tokenizer_files import SEPARATOR, write_words
from .runs import GPT2, KEY, LLAMA, MODELS, VECTORS, assert_same_logits, manifest_for, pulled, save_stages, trained

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
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
