"""Which runs of a built-in model take loops of members' own."""

from __future__ import annotations

from typing import Any

import pytest

from farandole.protocol.run.manifest import manifest_from_dict
from farandole.protocol.run.mixed_runs import tokens_of_step, why_no_loop

SIZES = {"num_layers": 2, "width": 16, "num_heads": 2, "hidden": 32, "context": 16, "vocabulary": 256}
EXTERNAL = {**dict.fromkeys(SIZES, 0), "num_layers": 1, "external": {"parameters": {"weight": [2, 3]}}}


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({}, ""),
        ({"inner": {"optimizer": "muon"}, "outer": {"codec": "topk", "fragments": 2}}, ""),
        ({"rounds": {"inner_steps": 8}, "data": {"source": "text"}}, ""),
        ({"model": EXTERNAL}, ""),
        ({"model": {**SIZES, "num_stages": 2}}, "model.num_stages"),
        ({"inner": {"deterministic": True}}, "inner.deterministic"),
        ({"inner": {"deterministic": True}, "audits": 0.1}, "audits"),
        ({"data": {"epochs": 2}}, "data.epochs"),
        ({"data": {"mask_documents": True}}, "data.mask_documents"),
        ({"outer": {"drift": 0.1}}, "outer.drift"),
        ({"rounds": {"partners": 2}}, "rounds.partners"),
    ],
)
def test_a_run_that_depends_on_inner_steps_or_batches_takes_no_loops(settings: dict[str, Any], setting: str) -> None:
    reason = why_no_loop(manifest_from_dict({"name": "a run", "model": SIZES, **settings}))
    assert setting in reason
    assert bool(reason) == bool(setting)


def test_only_built_in_trainers_have_a_step_of_known_size() -> None:
    assert tokens_of_step(manifest_from_dict({"name": "a run", "model": SIZES, "inner": {"batch_size": 4}})) == 64
    assert tokens_of_step(manifest_from_dict({"name": "a run", "model": EXTERNAL})) == 0
