import pytest
import torch

from farandole.training.device import choose_device
from farandole.training.errors import TrainingError


def test_the_cpu_always_works_in_full_precision() -> None:
    device = choose_device("cpu")

    assert device.torch_device == torch.device("cpu")
    assert device.autocast_dtype is None
    assert device.description.startswith("CPU")
    assert device.memory() is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_is_taken_of_a_gpu_is_told() -> None:
    device = choose_device("cuda")
    kept = torch.zeros(2**20, device=device.torch_device)
    memory = device.memory()
    assert memory is not None
    taken, total = memory
    assert kept.nbytes <= taken < total


def test_auto_prefers_an_accelerator() -> None:
    has_accelerator = torch.cuda.is_available() or torch.backends.mps.is_available()

    assert (choose_device().torch_device.type != "cpu") == has_accelerator


@pytest.mark.parametrize("name", ["tpu", "", "cpu:x", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(TrainingError):
        choose_device(name)
