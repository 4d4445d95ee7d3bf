"""The table of settings that exclude each other: each pair is refused, and each of its settings is fine alone."""

from __future__ import annotations

from typing import Any, Final

import pytest

from farandole.protocol.run.exclusions import EXCLUSIONS, exclusions_in, why_no_loop
from farandole.protocol.run.manifest import Manifest, manifest_from_dict
from farandole.protocol.wire.errors import ManifestError

from .test_families import GPT2
from .test_families import SIZES as GPT2_SIZES
from .test_manifest import MODEL, OWN

EXTERNAL: Final = {"parameters": {"weight": [8, 8]}}
# How a run file uses each setting of the table.
USES: Final[dict[str, dict[str, Any]]] = {
    "audits": {"audits": 0.1, "inner": {"deterministic": True}},
    "model.num_stages": {"model": {**MODEL, "num_stages": 2}},
    "model.hf": {"model": {**GPT2_SIZES, "hf": GPT2}},
    "model.own": {"model": {**MODEL, "num_layers": 1, "num_heads": 0, "hidden": 0, "width": 0, "own": OWN}},
    "model.external": {
        "model": {
            **dict.fromkeys(MODEL, 0),
            "num_layers": 1,
            "external": EXTERNAL,
        }
    },
    "rounds.overlap": {"rounds": {"overlap": True}},
    "rounds.partners": {"rounds": {"partners": 2}},
    "data.epochs": {"data": {"epochs": 1}},
    "data.mask_documents": {"data": {"mask_documents": True}},
    "outer.codec = topk": {"outer": {"codec": "topk"}},
    "outer.fragments": {"outer": {"fragments": 2}},
    "outer.momentum_codec": {"outer": {"momentum_codec": "int4"}, "inner": {"optimizer": "muon"}},
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
        for section, given in USES.get(setting, {}).items():
            before = described.get(section) if section != "model" else None
            described[section] = {**before, **given} if isinstance(before, dict) else given
    return manifest_from_dict(described)


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
    "setting",
    ["model.num_stages", "inner.deterministic", "data.epochs", "data.mask_documents", "rounds.partners"],
)
def test_a_run_that_depends_on_inner_steps_or_batches_takes_no_loops(setting: str) -> None:
    assert setting in why_no_loop(manifest_with(setting))
