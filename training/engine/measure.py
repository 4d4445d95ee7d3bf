"""How long the parts of a model take on this machine: one microbatch forward and backward, as a stage computes it.

A run's creator cuts the model by these times (`farandole.protocol.run.models`). Multiplications can be counted, but a
norm, a rotary embedding or a loss over a large vocabulary takes more time than their count suggests, depending on the
device.

One part is in memory at a time, a layer or both ends, so a model can be measured that no device holds. All layers of a
model are of one kind and shape (`farandole.protocol.run.models`), so one of them is timed for all. What happens once
an inner step and not for each microbatch is left out, and so is the encoding of activations, which costs all stages
alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from farandole.protocol.run.manifest import ModelConfig, PipelineConfig
from farandole.protocol.run.models import Costs

from ..base.device import Device
from ..model.stages import as_stage, build_module

# The first calls choose kernels and get memory from the system.
NUM_WARM_UPS = 2
# Number of measurements whose median is taken: other work of the machine affects some of them.
NUM_REPEATS = 7
# Of the weights: what they are does not matter.
_SEED = 0


def measure(
    model: ModelConfig, pipeline: PipelineConfig, device: Device, allowed_models: Collection[str] = ()
) -> Costs:
    """Seconds that each layer takes for one microbatch, and both ends together.

    Raises `TrainingError` if the model is one of transformers', and that is not installed; `RuntimeError` if a part
    does not fit into the device's memory.
    """
    layer = build_module(model, _SEED, range(1), has_ends=False, allowed_models=allowed_models)
    layer_time = layer_seconds(layer, model, pipeline, device)
    ends = build_module(model, _SEED, range(0), allowed_models=allowed_models)
    return Costs((layer_time,) * model.num_layers, ends_seconds(ends, model, pipeline, device))


def layer_seconds(module: nn.Module, model: ModelConfig, pipeline: PipelineConfig, device: Device) -> float:
    """Return the seconds of one microbatch through the layers of a `StageModule`, forward and backward."""
    stage = as_stage(_prepared(module, device))
    shape = (pipeline.microbatch_size, model.context, model.width)
    x = torch.randn(shape, device=device.torch_device, requires_grad=True)

    def advance() -> Tensor:
        with device.autocast():
            return stage.advance(x).float()

    return _median_seconds(_there_and_back(advance, torch.randn_like(x), pipeline), device)


def ends_seconds(module: nn.Module, model: ModelConfig, pipeline: PipelineConfig, device: Device) -> float:
    """Return the seconds of one microbatch through a `StageModule`'s embedding, head and loss, forward and backward."""
    stage = as_stage(_prepared(module, device))
    shape = (pipeline.microbatch_size, model.context, model.width)
    tokens = torch.randint(model.vocabulary, (shape[0], shape[1] + 1), device=device.torch_device)
    last = torch.randn(shape, device=device.torch_device, requires_grad=True)

    def embed() -> Tensor:
        with device.autocast():
            return stage.embed(tokens[:, :-1]).float()

    draw = _there_and_back(embed, torch.randn_like(last), pipeline)

    def work() -> None:
        draw()
        with device.autocast():
            loss = stage.loss(last, tokens[:, 1:])
        loss.backward()

    return _median_seconds(work, device)


def _prepared(module: nn.Module, device: Device) -> nn.Module:
    """On the device, with gradients to be added to, as a stage has them."""
    module.to(device.torch_device)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return module


def _there_and_back(forward: Callable[[], Tensor], gradient: Tensor, pipeline: PipelineConfig) -> Callable[[], None]:
    def work() -> None:
        if pipeline.recompute:
            with torch.no_grad():
                forward()
        torch.autograd.backward([forward()], [gradient])

    return work


def _median_seconds(work: Callable[[], None], device: Device) -> float:
    seconds = []
    for _ in range(NUM_WARM_UPS + NUM_REPEATS):
        _wait_for(device)
        started_at = time.perf_counter()
        work()
        _wait_for(device)
        seconds.append(time.perf_counter() - started_at)
    return statistics.median(seconds[NUM_WARM_UPS:])


def _wait_for(device: Device) -> None:
    """Wait until the device has finished its queued work."""
    match device.torch_device.type:
        case "cuda":
            torch.cuda.synchronize(device.torch_device)
        case "mps":
            torch.mps.synchronize()
