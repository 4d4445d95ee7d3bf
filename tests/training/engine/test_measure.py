"""A model's parts are timed one by one, whatever kind it is, and a slow layer gets fewer neighbours in its stage."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from msgspec.structs import replace
from torch import nn

from farandole.protocol.run.manifest import ModelConfig, PipelineConfig
from farandole.training.base.device import choose_device
from farandole.training.engine import measure as measuring
from farandole.training.engine.measure import measure
from farandole.training.model.stages import build_module

CPU = choose_device("cpu")


@pytest.mark.parametrize("recompute", [False, True])
def test_a_model_of_our_own_is_measured(model: ModelConfig, recompute: bool) -> None:
    seconds = measure(model, PipelineConfig(microbatch_size=2, recompute=recompute), CPU)
    assert len(seconds.layers) == model.num_layers
    assert min(*seconds.layers, seconds.ends) > 0


def test_one_part_is_in_memory_at_a_time(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[int, bool]] = []

    def build(
        model: ModelConfig, seed: int, layers: range, *, has_ends: bool = True, allowed_models: Collection[str]
    ) -> nn.Module:
        built.append((len(layers), has_ends))
        return build_module(model, seed, layers, has_ends=has_ends, allowed_models=allowed_models)

    monkeypatch.setattr(measuring, "build_module", build)
    assert len(measure(replace(model, num_layers=200), PipelineConfig(), CPU).layers) == 200
    assert built == [(1, False), (0, True)]
