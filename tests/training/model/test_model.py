from __future__ import annotations

import math

import pytest
import torch

from farandole.protocol.run.manifest import ModelConfig
from farandole.protocol.run.models import PRESETS, num_parameters, preset
from farandole.training.model.model import Transformer, build_model, language_loss, rotary_tables, rotate


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
