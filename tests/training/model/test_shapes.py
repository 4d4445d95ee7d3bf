"""Shapes are told as the modules have them, of the whole model and of each stage."""

import pytest
from msgspec.structs import replace

from farandole.protocol.run.manifest import ModelConfig
from farandole.protocol.run.models import names_of_stage, preset, shapes_of
from farandole.training.model.stages import build_module, build_stage

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
from .test_hf import SETTINGS, hf_model


@pytest.mark.parametrize("model", [preset("tiny"), *(hf_model(name) for name in SETTINGS)], ids=["own", *SETTINGS])
def test_names_shapes_and_order_are_the_modules(model: ModelConfig) -> None:
    whole = {name: tuple(parameter.shape) for name, parameter in build_module(model, 0).named_parameters()}
    assert list(shapes_of(model).items()) == list(whole.items())
    for stages in (2, 3):
        cut = replace(model, num_stages=stages)
        for stage in range(stages):
            own = {name for name, _ in build_stage(cut, 0, stage).named_parameters()}
            assert names_of_stage(cut, stage) == own
