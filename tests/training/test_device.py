import pytest
import torch

from farandole.training.device import choose_device
from farandole.training.errors import TrainingError


def test_the_cpu_always_works_in_full_precision() -> None:
    device = choose_device("cpu")

    assert device.torch_device == torch.device("cpu")
    assert device.autocast_dtype is None
    assert device.description.startswith("CPU")


def test_auto_prefers_an_accelerator() -> None:
    has_accelerator = torch.cuda.is_available() or torch.backends.mps.is_available()

    assert (choose_device().torch_device.type != "cpu") == has_accelerator


@pytest.mark.parametrize("name", ["tpu", "", "cpu:x", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(TrainingError):
        choose_device(name)
