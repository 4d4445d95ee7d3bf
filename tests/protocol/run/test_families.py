"""Settings of transformers' models in a manifest: only of a known family, and within bounds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.run.families import hf_config_from_dict
from farandole.protocol.run.families.gpt2 import GPT2Config
from farandole.protocol.run.families.llama import LlamaConfig
from farandole.protocol.run.manifest import Manifest, decode_manifest, manifest_from_dict, sign_manifest
from farandole.protocol.wire.errors import ManifestError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_embd": 32,
    "n_inner": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
}
LLAMA_3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SIZES = {"num_layers": 3, "width": 32, "num_heads": 4, "hidden": 64, "vocabulary": 256, "context": 64}


def manifest(hf: object, **model: object) -> Manifest:
    return manifest_from_dict({"name": "a", "model": {**SIZES, "hf": hf, **model}})


@pytest.mark.parametrize(("settings", "kind"), [(LLAMA, LlamaConfig), (GPT2, GPT2Config)])
def test_a_manifest_keeps_every_setting(settings: dict[str, Any], kind: type) -> None:
    signed = sign_manifest(manifest(settings), Ed25519PrivateKey.from_private_bytes(bytes(32)))
    decoded, _ = decode_manifest(signed.encode(), signed.run_id)
    assert isinstance(decoded.model.hf, kind)
    assert decoded == manifest(settings)
    assert msgspec.json.encode(decoded.model.hf) == msgspec.json.encode(hf_config_from_dict(settings))
    assert b"initializer_range" in signed.body  # defaults are written out too


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model_type": "mixtral"}, "Invalid value 'mixtral' - at `.*model_type`"),
        ({"hidden_size": 2**20}, "hidden_size"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"hidden_size": 34}, "a multiple of num_attention_heads"),
        ({"num_hidden_layers": 10**30}, "out of range|num_hidden_layers"),
        ({"head_dim": 9}, "turn pairs"),
        ({"num_key_value_heads": 3}, "a multiple of num_key_value_heads"),
        ({"hidden_act": "eval"}, "hidden_act"),
        ({"initializer_range": float("nan")}, "initializer_range"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"attention_dropout": 0.5}, "attention_dropout"),
        ({"auto_map": {"AutoModel": "modeling.Evil"}}, "auto_map"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "linear", "factor": float("nan")}}, "factor"),
        ({"rope_parameters": {"rope_type": "default", "x": {"y": [{}] * 9}}}, "unknown field `x`"),
        ({"rope_parameters": [[[[]]]]}, "rope_parameters"),
        ({"rope_parameters": {**LLAMA_3_ROPE, "low_freq_factor": 4.0}}, "low_freq_factor must be less"),
        ({**GPT2, "n_embd": 34}, "a multiple of n_head"),
        ({**GPT2, "n_positions": 2**30}, "n_positions"),
        ({**GPT2, "resid_pdrop": 0.1}, "resid_pdrop"),
        ({**GPT2, "layer_norm_epsilon": float("nan")}, "layer_norm_epsilon"),
        ({**GPT2, "hidden_size": 32}, "hidden_size"),
    ],
)
def test_what_is_wrong_is_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    settings = wrong if wrong.keys() >= GPT2.keys() else {**LLAMA, **wrong}
    for make in (manifest, hf_config_from_dict):
        with pytest.raises(ManifestError, match=message):
            make(settings)


def test_heads_of_gpt2_may_be_odd_since_nothing_is_rotated() -> None:
    assert manifest({**GPT2, "n_embd": 36}, width=36).model.width == 36


@pytest.mark.parametrize("settings", [LLAMA, GPT2])
@pytest.mark.parametrize("name", ["num_layers", "width", "num_heads", "hidden", "vocabulary"])
def test_sizes_must_be_those_of_the_configuration(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ManifestError, match=rf"model\.{name} is {2 * SIZES[name]}, but model\.hf makes it"):
        manifest(settings, **{name: 2 * SIZES[name]})


@pytest.mark.parametrize("settings", [LLAMA, GPT2])
def test_a_sequence_is_no_longer_than_the_model_goes(settings: dict[str, Any]) -> None:
    assert manifest(settings, context=8).model.context == 8
    with pytest.raises(ManifestError, match=r"model\.context is 65, but model\.hf goes to 64"):
        manifest(settings, context=65)
