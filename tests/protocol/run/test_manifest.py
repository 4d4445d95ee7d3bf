"""The manifest: signed, self-certifying, never out of range, and without settings that exclude each other."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from farandole.protocol.run.exclusions import EXCLUSIONS, exclusions_in, why_no_loop
from farandole.protocol.run.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    SignedManifest,
    decode_manifest,
    manifest_from_dict,
    sign_manifest,
)
from farandole.protocol.run.rules import (
    DEFAULT_SCREENING,
    FAST,
    OPTIMIZER_VECTORS,
    SLOW,
    NoLoCoConfig,
    OuterRules,
    gamma_limit,
)
from farandole.protocol.wire.errors import ManifestError, UnknownManifestError
from farandole.protocol.wire.identity import public_bytes, sign

from .test_families import GPT2
from .test_families import SIZES as GPT2_SIZES

CREATOR = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OWN = {"function": "a.b:c", "package": "a", "ends": {"weight": [100, 100]}}
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


def test_another_runs_manifest_one_that_its_creator_did_not_sign_and_a_long_one_are_refused() -> None:
    signed = sign_manifest(manifest(), CREATOR)
    forged = SignedManifest(msgspec.msgpack.encode(manifest(seed=1)), signed.creator, signed.signature)
    for raw, words in (
        (signed.encode(), "is of run"),
        (forged.encode(), "signature"),
        (bytes(2 * MAX_MANIFEST_BYTES + 1), "at most"),
    ):
        with pytest.raises(ManifestError, match=words):
            decode_manifest(raw, bytes(32) if words == "is of run" else None)


@given(st.data())
def test_no_changed_byte_goes_unnoticed(data: st.DataObject) -> None:
    signed = sign_manifest(manifest(), CREATOR)
    raw = bytearray(signed.encode())
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ManifestError):
        decode_manifest(bytes(raw), signed.run_id)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"colour": "red"}, "colour"),
        ({"name": "\x1b[31m"}, "name"),
        ({"seed": -1}, "seed"),
        ({"model": {**MODEL, "width": 30, "num_heads": 4}}, "width"),
        ({"model": {**MODEL, "num_stages": 4}}, "num_stages"),
        ({"model": {**MODEL, "num_stages": 2, "stage_layers": [1, 2]}}, "stage_layers"),
        ({"model": {**MODEL, "num_stages": 3, "stage_layers": [1, 0, 1]}}, "stage_layers"),
        ({"model": {**MODEL, "num_stages": 2}, "pipeline": {"microbatch_size": 3}}, "microbatch_size"),
        ({"model": {**MODEL, "vocabulary": 100}}, "vocabulary"),
        ({"tokenizer": {"kind": "tokenizers"}}, "sha256"),
        ({"data": {"source": "http://example.org"}}, "source"),
        ({"inner": {"learning_rate": float("nan")}}, "learning_rate"),
        ({"inner": {"learning_rate": float("inf")}}, "learning_rate"),
        ({"inner": {"beta2": 1.0}}, "beta2"),
        ({"outer": {"codec": "zip"}}, "codec"),
        ({"outer": {"codec": "topk"}}, "outer.codec = topk is no longer there"),
        ({"rounds": {"inner_steps": 0, "round_seconds": 0}}, "never end"),
        ({"admission": "closed"}, "admission"),
        ({"admission": ["12D3KooWnobody"]}, "no peer id"),
        ({"outer": {"fragments": 65}}, "fragments"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        manifest(**sections)


@pytest.mark.parametrize("momentum", ["heavy_ball", "nesterov"])
@given(alpha=st.floats(0, 0.95), gamma=st.floats(0.01, 3))
def test_gamma_must_lie_in_the_window_in_which_pairs_are_stable(momentum: Any, alpha: float, gamma: float) -> None:
    outer: dict[str, Any] = {"alpha": alpha, "gamma": gamma, "momentum": momentum}
    if gamma < gamma_limit(alpha, momentum):
        assert manifest(outer=outer).outer == NoLoCoConfig(**outer)
    else:
        with pytest.raises(ManifestError, match="stable only for 0 < gamma <"):
            manifest(outer=outer)


# Signed before outer rules and screening rules had names: it has no ``outer.kind`` and no ``screening``.
WITHOUT_KINDS = bytes.fromhex((Path(__file__).parent / "vectors" / "manifest_without_kinds.hex").read_text())


def test_a_manifest_from_before_there_were_kinds_is_noloco_and_keeps_its_run_id() -> None:
    decoded, signed = decode_manifest(WITHOUT_KINDS)

    assert signed.run_id.hex() == "979f4132b936833716a8302660c68edc529c5d64ad95782845de1b7370e035d3"
    assert decoded == manifest(outer={"kind": "noloco", "gamma": 0.5, "codec": "int8"})
    assert decoded.screening == DEFAULT_SCREENING
    assert not decoded.inner.deterministic


def test_settings_that_went_are_ignored_unless_they_made_a_difference() -> None:
    now = msgspec.to_builtins(manifest())
    went: dict[str, dict[str, Any]] = {
        "inner": {"z_loss": 0.0, "ends_rate": 1.0},
        "outer": {"drift": 0.0, "error_feedback": True, "topk": 32},
        "screening": {"first_checks": 3, "checked_share": 1},
    }
    assert (
        manifest_from_dict({**now, **{name: {**now[name], **section} for name, section in went.items()}}) == manifest()
    )
    for section, setting in (("outer", "drift"), ("inner", "z_loss")):
        with pytest.raises(ManifestError, match=setting):
            manifest_from_dict({**now, section: {**now[section], setting: 0.1}})


def test_a_run_with_the_codec_that_went_is_refused_and_one_with_its_setting_alone_keeps_its_run_id() -> None:
    settings = msgspec.to_builtins(manifest())

    def signed(codec: str) -> SignedManifest:
        body = msgspec.msgpack.encode({**settings, "outer": {**settings["outer"], "codec": codec, "topk": 64}})
        return SignedManifest(body, public_bytes(CREATOR), sign(CREATOR, b"farandole/manifest/1", body))

    same, older = decode_manifest(signed("int8").encode(), signed("int8").run_id)
    assert same == manifest(outer={"codec": "int8"})
    assert older.body != sign_manifest(same, CREATOR).body
    with pytest.raises(UnknownManifestError, match="needs an earlier farandole"):
        decode_manifest(signed("topk").encode())


def test_vectors_of_rules_have_names_of_their_own() -> None:
    """A vector of a rule with another's name would be loaded as the other."""
    for rule in typing.get_args(OuterRules):
        assert not {SLOW, FAST, *OPTIMIZER_VECTORS} & set(rule.vectors)
        assert len(set(rule.vectors)) == len(rule.vectors)


def test_a_manifest_of_a_later_release_is_refused_with_the_remedy_once_its_signature_is_checked() -> None:
    signed = sign_manifest(manifest(), CREATOR)
    later = msgspec.msgpack.encode([*msgspec.structs.astuple(signed), "later"])
    with pytest.raises(UnknownManifestError, match=r"upgrade this node \(docs/volunteer.md#upgrade\)"):
        decode_manifest(later, signed.run_id)
    forged = msgspec.msgpack.encode([signed.body, signed.creator, bytes(64), "later"])
    with pytest.raises(ManifestError, match="signature") as caught:
        decode_manifest(forged)
    assert not isinstance(caught.value, UnknownManifestError)
    body = msgspec.msgpack.encode({**msgspec.to_builtins(manifest()), "colour": "red"})
    with pytest.raises(UnknownManifestError, match="upgrade this node"):
        decode_manifest(SignedManifest(body, signed.creator, sign(CREATOR, b"farandole/manifest/1", body)).encode())


EXTERNAL: Final = {"parameters": {"weight": [8, 8]}}
# How a run file uses each setting of the table.
USES: Final[dict[str, dict[str, Any]]] = {
    "audits": {"audits": 0.1, "inner": {"deterministic": True}},
    "model.num_stages": {"model": {**MODEL, "num_stages": 2}},
    "model.hf": {"model": {**GPT2_SIZES, "hf": GPT2}},
    "model.own": {"model": {**MODEL, "num_layers": 1, "num_heads": 0, "hidden": 0, "width": 0, "own": OWN}},
    "model.external": {"model": {**dict.fromkeys(MODEL, 0), "num_layers": 1, "external": EXTERNAL}},
    "rounds.overlap": {"rounds": {"overlap": True}},
    "rounds.partners": {"rounds": {"partners": 2}},
    "data.epochs": {"data": {"epochs": 1}},
    "data.mask_documents": {"data": {"mask_documents": True}},
    "outer.fragments": {"outer": {"fragments": 2}},
    "inner.deterministic": {"inner": {"deterministic": True}},
    "tokenizer": {"tokenizer": {"kind": "tokenizers", "sha256": "0" * 64}},
    "data": {"data": {"source": "text"}},
    "inner": {"inner": {"clip": 0.5}},
    "pipeline": {"pipeline": {"in_flight": 4}},
}
PAIRS: Final = [(each.setting, other, each.reason) for each in EXCLUSIONS for other in each.others]


def manifest_with(*settings: str) -> Manifest:
    """Return a manifest that uses the settings; of two in one section, both."""
    described: dict[str, Any] = {"name": "a run", "model": MODEL}
    for setting in settings:
        for section, used in USES.get(setting, {}).items():
            before = described.get(section) if section != "model" else None
            described[section] = {**before, **used} if isinstance(before, dict) else used
    return manifest_from_dict(described)


def test_momentum_is_averaged_of_muon_or_of_loops_optimizers() -> None:
    averaged = {"outer": {"momentum_codec": "int4"}}
    for described in ({"inner": {"optimizer": "muon"}, "model": MODEL}, USES["model.external"]):
        assert manifest_from_dict({"name": "a run", **described, **averaged}).outer.momentum_codec == "int4"
    with pytest.raises(ManifestError, match=r"only inner\.optimizer = muon has"):
        manifest_from_dict({"name": "a run", "model": MODEL, **averaged})


def test_there_are_few_rows() -> None:
    assert len(EXCLUSIONS) <= 12
    assert len(PAIRS) == len({frozenset(pair[:2]) for pair in PAIRS})


@pytest.mark.parametrize(("setting", "other", "reason"), PAIRS)
def test_each_pair_is_refused_with_its_reason_and_each_setting_is_fine_alone(
    setting: str, other: str, reason: str
) -> None:
    flags = [name for name in (setting, other) if name.startswith("--")]
    for name in (setting, other):
        assert list(exclusions_in(manifest_with(name), [name] if name in flags else [])) == []
    words = f"{setting} and {other} exclude each other: {reason}"
    if flags:
        assert list(exclusions_in(manifest_with(setting, other), flags)) == [words]
    else:
        with pytest.raises(ManifestError) as caught:
            manifest_with(setting, other)
        assert words in str(caught.value)


@pytest.mark.parametrize(
    "setting", ["model.num_stages", "inner.deterministic", "data.epochs", "data.mask_documents", "rounds.partners"]
)
def test_a_run_that_depends_on_inner_steps_or_batches_takes_no_loops(setting: str) -> None:
    assert setting in why_no_loop(manifest_with(setting))
