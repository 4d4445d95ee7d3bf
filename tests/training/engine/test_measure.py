"""A model's parts are timed one by one, whatever kind it is, and a slow layer gets fewer neighbours in its stage."""

from __future__ import annotations

import time
from collections.abc import Collection

import pytest
from msgspec.structs import replace
from torch import Tensor, nn

from farandole.protocol.run.manifest import ModelConfig, PipelineConfig
from farandole.protocol.run.models import Costs, cut
from farandole.training.base.device import choose_device
from farandole.training.engine import measure as measuring
from farandole.training.engine.measure import layer_seconds, measure
from farandole.training.model.model import build_model
from farandole.training.model.stages import build_module

CPU = choose_device("cpu")
# Longer than a small layer takes on a machine that is busy with other things.
SLOW_SECONDS = 0.2


class Sleeper(nn.Module):
    """A layer that takes its time."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        time.sleep(SLOW_SECONDS)
        y: Tensor = self.layer(x, cos, sin, mask)
        return y


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


def test_a_slow_layer_has_fewer_neighbours(model: ModelConfig) -> None:
    quick = build_model(model, 7, range(1), has_ends=False)
    slow = build_model(model, 7, range(1), has_ends=False)
    slow.layers["0"] = Sleeper(slow.layers["0"])
    pipeline = PipelineConfig(microbatch_size=2)
    usual, long = (layer_seconds(module, model, pipeline, CPU) for module in (quick, slow))
    stages = cut(Costs((usual, usual, usual, long, usual, usual), 0.0), 3)
    assert [stage for stage in stages if 3 in stage] == [range(3, 4)]
