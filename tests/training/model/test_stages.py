"""Where a model is cut, and that its stages are the whole model."""

import itertools

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farandole.protocol.run.manifest import ModelConfig
from farandole.protocol.run.models import (
    MAX_PARAMETER_SHARE,
    PRESETS,
    Costs,
    cut,
    cut_by_time,
    layers_of,
    parameter_costs,
    preset,
    stage_parameters,
    transformer_costs,
)
from farandole.protocol.wire.errors import ManifestError
from farandole.training.model.model import build_model
from farandole.training.model.stages import as_stage, build_stage


def dearest(costs: Costs, stages: tuple[range, ...]) -> float:
    return max(costs.of(stages))


def every_cut(num_layers: int, num_stages: int) -> list[tuple[range, ...]]:
    cuts = itertools.combinations_with_replacement(range(num_layers + 1), num_stages - 1)
    stages = [tuple(itertools.starmap(range, itertools.pairwise((0, *ends, num_layers)))) for ends in cuts]
    return [layers for layers in stages if all(layers[1:])]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(0, 12), st.data())
def test_no_cut_has_a_cheaper_dearest_stage(layers: list[int], ends: int, data: st.DataObject) -> None:
    costs = Costs(tuple(map(float, layers)), float(ends))
    num_stages = data.draw(st.integers(1, len(layers) + 1))

    stages = cut(costs, num_stages)

    assert len(stages) == num_stages
    assert [layer for stage in stages for layer in stage] == list(range(len(layers)))
    assert all(stages[1:])
    assert dearest(costs, stages) == min(dearest(costs, other) for other in every_cut(len(layers), num_stages))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=7), st.data())
def test_no_cut_within_a_limit_has_a_cheaper_dearest_stage(layers: list[tuple[int, int]], data: st.DataObject) -> None:
    seconds, sizes = (
        Costs(tuple(map(float, column)), float(data.draw(st.integers(0, 12)))) for column in zip(*layers, strict=True)
    )
    num_stages = data.draw(st.integers(1, len(layers) + 1))
    limit = sizes, float(data.draw(st.integers(1, 40)))
    allowed = [other for other in every_cut(len(layers), num_stages) if dearest(sizes, other) <= limit[1]]

    if allowed:
        assert dearest(seconds, cut(seconds, num_stages, limit)) == min(dearest(seconds, other) for other in allowed)
        assert cut(seconds, num_stages, limit) in allowed
    else:
        with pytest.raises(ManifestError, match="so small"):
            cut(seconds, num_stages, limit)


def test_a_model_is_cut_by_time_while_no_stage_has_many_more_parameters() -> None:
    model = ModelConfig(num_layers=8, width=64, num_heads=4, hidden=160, context=64, vocabulary=256, num_stages=2)
    assert cut_by_time(model, Costs((1.0,) * 8, 2.0)) == (range(3), range(3, 8))
    assert cut_by_time(model, Costs((1.0,) * 5 + (2.0, 2.0, 1.0), 0.0)) == (range(5), range(5, 8))
    even = sum(parameter_costs(model).of((range(8),))) / 2
    stages = cut_by_time(model, Costs((0.001,) * 7 + (9.0,), 0.0))  # the last layer alone would be fastest
    assert max(parameter_costs(model).of(stages)) <= MAX_PARAMETER_SHARE * even
    assert len(stages[1]) > 1


@pytest.mark.parametrize("num_stages", [0, 4])
def test_too_many_stages_are_refused(num_stages: int) -> None:
    with pytest.raises(ManifestError, match="cannot be cut"):
        cut(Costs((1.0, 1.0), 1.0), num_stages)


def test_every_node_cuts_alike(model: ModelConfig) -> None:
    staged = with_stages(model, 3)
    assert layers_of(staged) == (range(0, 0), range(0, 1), range(1, 2))
    given = msgspec.structs.replace(staged, stage_layers=(0, 1, 1), num_layers=2)
    assert layers_of(given) == (range(0, 0), range(0, 1), range(1, 2))
    assert layers_of(msgspec.structs.replace(given, stage_layers=(1, 1), num_stages=2)) == (range(1), range(1, 2))


@pytest.mark.parametrize("name", [name for name in PRESETS if PRESETS[name].num_layers >= 4])
def test_stages_of_the_presets_cost_about_the_same(name: str) -> None:
    model = preset(name)
    costs = transformer_costs(model)
    mean = (sum(costs.layers) + costs.ends) / 4
    assert dearest(costs, cut(costs, 4)) <= mean + max(costs.layers)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_all_stages_together_are_the_whole_model(model: ModelConfig, num_stages: int) -> None:
    staged = with_stages(model, num_stages)
    stages = [build_stage(staged, 7, stage) for stage in range(num_stages)]
    whole = build_model(model, 7)

    parts = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(parts) == sorted(name for name, _ in whole.named_parameters())
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter, whole.get_parameter(name))
    tokens = torch.arange(32).view(2, 16)
    x = as_stage(stages[0]).embed(tokens)
    for stage in stages:
        x = as_stage(stage).advance(x)
    assert torch.equal(as_stage(stages[0]).logits(x), whole(tokens))


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_a_stages_numbers_are_counted_without_building_it(model: ModelConfig, num_stages: int) -> None:
    staged = with_stages(model, num_stages)
    for stage in range(num_stages):
        built = build_stage(staged, 7, stage)
        assert stage_parameters(staged, stage) == sum(parameter.numel() for parameter in built.parameters())


def with_stages(model: ModelConfig, num_stages: int) -> ModelConfig:
    return ModelConfig(
        num_layers=model.num_layers,
        width=model.width,
        num_heads=model.num_heads,
        hidden=model.hidden,
        context=model.context,
        vocabulary=model.vocabulary,
        num_stages=num_stages,
    )
