"""The manifest: signed, self-certifying, and never out of range."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from farandole.protocol.errors import ManifestError
from farandole.protocol.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    SignedManifest,
    decode_manifest,
    gamma_limit,
    manifest_from_dict,
    sign_manifest,
)

CREATOR = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
MODEL = {"num_layers": 2, "width": 32, "num_heads": 2, "hidden": 64, "context": 32, "vocabulary": 256}


def manifest(**sections: Any) -> Manifest:
    return manifest_from_dict({"name": "a run", "model": MODEL, **sections})


def test_a_manifest_proves_itself() -> None:
    signed = sign_manifest(manifest(seed=7), CREATOR)
    decoded, again = decode_manifest(signed.encode(), signed.run_id)
    assert decoded == manifest(seed=7)
    assert again == signed
    assert sign_manifest(manifest(seed=8), CREATOR).run_id != signed.run_id
    assert sign_manifest(manifest(seed=7), Ed25519PrivateKey.generate()).run_id != signed.run_id


def test_another_runs_manifest_is_refused() -> None:
    signed = sign_manifest(manifest(), CREATOR)
    with pytest.raises(ManifestError, match="is of run"):
        decode_manifest(signed.encode(), bytes(32))


def test_a_manifest_that_its_creator_did_not_sign_is_refused() -> None:
    signed = sign_manifest(manifest(), CREATOR)
    forged = SignedManifest(msgspec.msgpack.encode(manifest(seed=1)), signed.creator, signed.signature)
    with pytest.raises(ManifestError, match="signature"):
        decode_manifest(forged.encode())


@given(st.binary(max_size=200))
def test_rubbish_is_no_manifest(raw: bytes) -> None:
    with pytest.raises(ManifestError):
        decode_manifest(raw)


@given(st.data())
def test_no_changed_byte_goes_unnoticed(data: st.DataObject) -> None:
    signed = sign_manifest(manifest(), CREATOR)
    raw = bytearray(signed.encode())
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ManifestError):
        decode_manifest(bytes(raw), signed.run_id)


def test_a_long_manifest_is_refused_unread() -> None:
    with pytest.raises(ManifestError, match="at most"):
        decode_manifest(bytes(2 * MAX_MANIFEST_BYTES + 1))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"colour": "red"}, "colour"),
        ({"name": ""}, "name"),
        ({"name": "\x1b[31m"}, "name"),
        ({"seed": -1}, "seed"),
        ({"seed": "7"}, "seed"),
        ({"model": {**MODEL, "width": 30, "num_heads": 4}}, "width"),
        ({"model": {**MODEL, "width": 34, "num_heads": 2}}, "width"),
        ({"model": {**MODEL, "num_stages": 4}}, "num_stages"),
        ({"model": {**MODEL, "num_stages": 2, "stage_layers": [1, 2]}}, "stage_layers"),
        ({"model": {**MODEL, "num_stages": 3, "stage_layers": [1, 0, 1]}}, "stage_layers"),
        ({"model": {**MODEL, "num_stages": 2}, "pipeline": {"microbatch_size": 3}}, "microbatch_size"),
        ({"model": {**MODEL, "vocabulary": 100}}, "vocabulary"),
        ({"tokenizer": {"kind": "tokenizers"}}, "sha256"),
        ({"tokenizer": {"sha256": "0" * 64}}, "sha256"),
        ({"data": {"source": "http://example.org"}}, "source"),
        ({"data": {"held_out": 0.9}}, "held_out"),
        ({"inner": {"learning_rate": float("nan")}}, "learning_rate"),
        ({"inner": {"learning_rate": float("inf")}}, "learning_rate"),
        ({"inner": {"learning_rate": 0}}, "learning_rate"),
        ({"inner": {"beta2": 1.0}}, "beta2"),
        ({"inner": {"batch_size": 0}}, "batch_size"),
        ({"outer": {"codec": "zip"}}, "codec"),
        ({"outer": {"alpha": 1.0}}, "alpha"),
        ({"outer": {"codec": "fp32", "error_feedback": True}}, "error_feedback"),
        ({"outer": {"codec": "topk", "error_feedback": False}}, "topk feeds back"),
        ({"outer": {"codec": "topk", "topk": 0}}, "topk"),
        ({"outer": {"codec": "topk", "topk": 129}}, "topk"),
        ({"rounds": {"inner_steps": 0, "round_seconds": 0}}, "never end"),
        ({"admission": "invited"}, "admission"),
        ({"rounds": {"exchange_seconds": 0.0}}, "exchange_seconds"),
        ({"outer": {"fragments": 0}}, "fragments"),
        ({"outer": {"fragments": 65}}, "fragments"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        manifest(**sections)


@pytest.mark.parametrize("momentum", ["heavy_ball", "nesterov"])
@given(alpha=st.floats(0, 0.95), gamma=st.floats(0.01, 3))
def test_gamma_must_lie_in_the_window_in_which_pairs_are_stable(momentum: Any, alpha: float, gamma: float) -> None:
    outer = {"alpha": alpha, "gamma": gamma, "momentum": momentum}
    if gamma < gamma_limit(alpha, momentum):
        assert manifest(outer=outer).outer.gamma == gamma
    else:
        with pytest.raises(ManifestError, match="stable only for 0 < gamma <"):
            manifest(outer=outer)


def test_the_limit_of_gamma() -> None:
    assert gamma_limit(0.5) == 1.5
    assert gamma_limit(0.9) == pytest.approx(0.38)
    assert gamma_limit(0.0, "nesterov") == 2.0
    assert gamma_limit(1e-6, "nesterov") == pytest.approx(2.0, abs=1e-3)
    assert gamma_limit(0.5, "nesterov") == pytest.approx(1.3028, abs=1e-4)
