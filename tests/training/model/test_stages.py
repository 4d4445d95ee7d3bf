"""The model, where it is cut, and that its stages are the whole model."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farandole.protocol.run.manifest import ModelConfig
from farandole.protocol.run.models import PRESETS, cut, layers_of, num_parameters, preset
from farandole.protocol.wire.errors import ManifestError
from farandole.training.model.model import Transformer, build_model, language_loss, rotary_tables, rotate


def dearest(layer: int, ends: int, stages: tuple[range, ...]) -> int:
    return max(len(each) * layer + (ends if number == 0 else 0) for number, each in enumerate(stages))


def every_cut(num_layers: int, num_stages: int) -> list[tuple[range, ...]]:
    cuts = itertools.combinations_with_replacement(range(num_layers + 1), num_stages - 1)
    stages = [tuple(itertools.starmap(range, itertools.pairwise((0, *ends, num_layers)))) for ends in cuts]
    return [layers for layers in stages if all(layers[1:])]


@given(st.integers(0, 9), st.integers(1, 7), st.integers(0, 40), st.data())
def test_no_cut_has_a_cheaper_dearest_stage(layer: int, num_layers: int, ends: int, data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, num_layers + 1))

    stages = cut(layer, ends, num_layers, num_stages)

    assert len(stages) == num_stages
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert all(stages[1:])
    best = min(dearest(layer, ends, other) for other in every_cut(num_layers, num_stages))
    assert dearest(layer, ends, stages) == best


@pytest.mark.parametrize("num_stages", [0, 4])
def test_too_many_stages_are_refused(num_stages: int) -> None:
    with pytest.raises(ManifestError, match="cannot be cut"):
        cut(1, 1, 2, num_stages)


def test_every_node_cuts_alike(model: ModelConfig) -> None:
    staged = msgspec.structs.replace(model, num_stages=3)
    assert layers_of(staged) == (range(0, 0), range(0, 1), range(1, 2))
    given = msgspec.structs.replace(staged, stage_layers=(0, 1, 1), num_layers=2)
    assert layers_of(given) == (range(0, 0), range(0, 1), range(1, 2))
    assert layers_of(msgspec.structs.replace(given, stage_layers=(1, 1), num_stages=2)) == (range(1), range(1, 2))


@pytest.mark.parametrize(
    ("vocabulary", "context", "num_layers"),
    [(256, 1_024, [3, 5, 5, 5]), (50_257, 1_024, [0, 6, 6, 6]), (50_257, 8_192, [3, 5, 5, 5])],
)
def test_every_release_cuts_alike(vocabulary: int, context: int, num_layers: list[int]) -> None:
    model = msgspec.structs.replace(preset("125M"), num_stages=4, vocabulary=vocabulary, context=context)
    assert [len(layers) for layers in layers_of(model)] == num_layers


@pytest.mark.parametrize("name", ["tiny", "0.5M", "3M"])
def test_the_first_loss_is_that_of_a_uniform_guess(name: str) -> None:
    tokens = torch.randint(0, 256, (4, 33), generator=torch.Generator().manual_seed(0))

    with torch.no_grad():
        loss = language_loss(build_model(preset(name), seed=0), tokens)

    assert float(loss) == pytest.approx(math.log(256), abs=0.1)


def test_no_position_sees_a_later_token(model: ModelConfig) -> None:
    transformer = build_model(model, seed=0)
    tokens = torch.arange(12)[None]
    changed = tokens.clone()
    changed[0, 7] = 50

    with torch.no_grad():
        before, after = transformer(tokens), transformer(changed)

    assert torch.equal(before[0, :7], after[0, :7])
    assert not torch.equal(before[0, 7:], after[0, 7:])


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    cos, sin = rotary_tables(context=32, head_width=8)
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))

    def product(i: int, j: int) -> float:
        return float(rotate(q, cos[i], sin[i]) @ rotate(k, cos[j], sin[j]))

    assert rotate(q, cos[31], sin[31]).norm() == pytest.approx(float(q.norm()), rel=1e-5)
    assert product(3, 10) == pytest.approx(product(20, 27), rel=1e-4)
    assert product(3, 10) != pytest.approx(product(3, 11), rel=1e-2)


UNITS = {"M": 1e6, "B": 1e9}


@pytest.mark.parametrize("name", PRESETS)
def test_the_count_is_that_of_the_real_model_and_as_large_as_its_name_says(name: str) -> None:
    with torch.device("meta"):
        model = Transformer(preset(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters(preset(name))
    if name != "tiny":
        assert num_parameters(preset(name)) == pytest.approx(float(name[:-1]) * UNITS[name[-1]], rel=0.05)
