import pytest
import torch

from farandole.protocol.run.models import PRESETS, num_parameters, preset
from farandole.protocol.wire.errors import ManifestError
from farandole.training.model.model import Transformer

UNITS = {"M": 1e6, "B": 1e9}


@pytest.mark.parametrize("name", PRESETS)
def test_the_count_is_that_of_the_real_model(name: str) -> None:
    with torch.device("meta"):
        model = Transformer(preset(name))

    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters(preset(name))


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "tiny"])
def test_a_preset_is_as_large_as_its_name_says(name: str) -> None:
    assert num_parameters(preset(name)) == pytest.approx(float(name[:-1]) * UNITS[name[-1]], rel=0.05)


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ManifestError, match="there are tiny, "):
        preset("7B")
