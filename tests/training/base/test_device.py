from types import SimpleNamespace

import pytest
import torch

from farandole.training.base.device import CONTEXT_BYTES, Device, choose_device, limit_memory
from farandole.training.base.errors import TrainingError

GB = 10**9


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_is_taken_of_a_gpu_is_told() -> None:
    device = choose_device("cuda")
    kept = torch.zeros(2**20, device=device.torch_device)
    memory = device.memory()
    assert memory is not None
    taken, total = memory
    assert kept.nbytes <= taken < total


def test_memory_is_bounded_where_there_is_a_gpu_alone_and_what_cuda_itself_takes_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bounded: list[tuple[float, int]] = []
    properties = SimpleNamespace(total_memory=16 * GB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, index: bounded.append((share, index))
    )
    gpu = Device(torch.device("cuda", 1), None, "a GPU")
    limit_memory(gpu, 8 * GB)
    limit_memory(gpu, 20 * GB)
    with pytest.raises(TrainingError, match="driver"):
        limit_memory(gpu, CONTEXT_BYTES)
    assert bounded == [((8 * GB - CONTEXT_BYTES) / (16 * GB), 1), (1.0, 1)]
    with pytest.raises(TrainingError, match="limits the memory of a GPU"):
        limit_memory(choose_device("cpu"), 8 * GB)


@pytest.mark.parametrize("name", ["tpu", "", "cpu:x", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(TrainingError):
        choose_device(name)
