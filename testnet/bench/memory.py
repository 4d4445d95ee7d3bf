"""A trainer's memory on a GPU and on the host, counted by PyTorch on tensors without contents.

No GPU is needed: models are made on the device "meta", whose tensors have sizes and nothing else, in `FakeTensorMode`,
which does the same for the host's tensors. `MemTracker` adds up live tensors. It cannot count the memory of CUDA's
kernels, its context and bf16 autocast.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Annotated, Final, NamedTuple

import msgspec
import numpy as np
import torch
import typer
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from farandole.protocol.manifest import InnerConfig, Manifest, ModelConfig
from farandole.protocol.outer_rules import NoLoCoConfig
from farandole.protocol.presets import preset
from farandole.training.batches import Batch, Batches
from farandole.training.device import Device
from farandole.training.learner import Learner
from farandole.training.model import build_model, language_loss
from farandole.training.replica import Recipe

from ..grid import Grid
from .report import OUT, BenchReport, Out, Write, open_bench

GPU: Final = torch.device("meta")
HOST: Final = torch.device("cpu")


class Held(NamedTuple):
    """Bytes on one device."""

    between: int
    """Between two inner steps."""
    most: int
    """At the peak, activations included."""


class _NoText(Batches):
    """Batches of one sequence of zeros."""

    def __init__(self, context: int) -> None:
        super().__init__(np.zeros(0, np.int64), 1, context)

    def batch(self, step: int) -> Batch:
        """Return the same batch each time."""
        return np.zeros((1, self.context + 1), np.int64)


def plain_loop(manifest: Manifest) -> Callable[[], None]:
    """Return an inner step of a plain training loop: `torch.optim.AdamW`, all gradients kept."""
    module, tokens = (
        _module_of(manifest.model),
        torch.zeros(1, manifest.model.context + 1, dtype=torch.long, device=GPU),
    )
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)

    def step() -> None:
        language_loss(module, tokens).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step


def trainer(manifest: Manifest, *, averages_on_host: bool) -> Callable[[], None]:
    """Return an inner step of a node's trainer, and the end of its round as far as it is on the GPU."""
    learner = Learner(
        _module_of(manifest.model),
        Recipe.of(manifest),
        _NoText(manifest.model.context),
        run_id=bytes(32),
        device=Device(GPU, None, "no device"),
        averages_on_host=averages_on_host,
    )

    def step() -> None:
        learner.learn()
        learner.contribution()

    return step


def _module_of(model: ModelConfig) -> nn.Module:
    with GPU:
        module = build_model(model, seed=0)
    # The module has its device already, and `Module.to` cannot exchange such parameters.
    module.to = lambda *_, **__: module  # type: ignore[method-assign]
    return module


def held_by(make: Callable[[], Callable[[], None]]) -> dict[torch.device, Held]:
    """Return the memory held by a loop: ``make`` returns the function that takes an inner step."""
    with FakeTensorMode(), MemTracker() as tracker:
        step = make()
        step()
        tracker.reset_mod_stats()
        step()
        gc.collect()
        now, peak = (tracker.get_tracker_snapshot(kind) for kind in ("current", "peak"))
    return {
        device: Held(*(int(snapshot.get(device, {}).get("Total", 0)) for snapshot in (now, peak)))
        for device in (GPU, HOST)
    }


def run(
    model: Annotated[str, typer.Option(help="A preset.")] = "125M",
    context: Annotated[int, typer.Option(min=1, help="Tokens of the one sequence.")] = 64,
    out: Out = OUT,
    write: Write = None,
) -> None:
    """Count what a trainer holds of a GPU's memory and of the host's, beside a plain loop; no GPU is needed.

    Examples: [cyan]farandole testnet bench memory[/cyan];
    [cyan]farandole testnet bench memory --model 1B --context 1024[/cyan]
    """
    with open_bench("memory", out, write, model=model, context=context) as bench:
        config = msgspec.structs.replace(preset(model), context=context)
        manifest = Manifest(name="memory", model=config, outer=NoLoCoConfig(codec="int8"))
        muon = msgspec.structs.replace(manifest, inner=InnerConfig(optimizer="muon"))
        held = {}
        for name, make in {
            "a plain loop, AdamW": lambda: plain_loop(manifest),
            "a node with `--average-on-gpu`": lambda: trainer(manifest, averages_on_host=False),
            "a node": lambda: trainer(manifest, averages_on_host=True),
            "a node with Muon": lambda: trainer(muon, averages_on_host=True),
        }.items():
            held[name] = held_by(make)
            bench.say(name)
        with FakeTensorMode(), GPU:
            num_parameters = sum(parameter.numel() for parameter in build_model(config, seed=0).parameters())
        bench.publish(report(bench.setting, num_parameters, held))


def report(setting: dict[str, object], num_parameters: int, held: dict[str, dict[torch.device, Held]]) -> BenchReport:
    """Return the table and its data."""
    rows = [
        [name, *(f"{size / num_parameters:.2f}" for size in (*each[GPU], each[HOST].between))]
        for name, each in held.items()
    ]
    words = [
        "Bytes a parameter, in fp32 and int8 on the wire, with AdamW where nothing else is said. *Peak*: with the "
        "activations of one sequence. *Host*: vectors; the copy from which checkpoints are written, 16 bytes, and two "
        "contributions come to that."
    ]
    data = {name: {device.type: each[device]._asdict() for device in each} for name, each in held.items()}
    header = ["", "GPU, between inner steps", "GPU, peak", "host"]
    return BenchReport(setting, [Grid(f"{num_parameters:,} parameters", header, rows)], data, words)
