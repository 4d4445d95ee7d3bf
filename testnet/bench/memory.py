"""A trainer's memory on a GPU and on the host, counted by PyTorch on tensors without contents, or on a real GPU.

Without a GPU, models are made on the device "meta", whose tensors have sizes and nothing else, in `FakeTensorMode`,
which does the same for the host's tensors. `MemTracker` adds up live tensors. It cannot count the memory of CUDA's
kernels, its context and bf16 autocast. With ``--device cuda`` the same loops run, and PyTorch's allocator is asked.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
import typer
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from farandole.protocol.planning.needs import needs_of
from farandole.protocol.run.manifest import InnerConfig, Manifest, ModelConfig
from farandole.protocol.run.outer_rules import NoLoCoConfig
from farandole.protocol.run.presets import preset
from farandole.training.base.device import Device, choose_device
from farandole.training.base.memory import is_out_of_memory
from farandole.training.data.batches import Batch, Batches
from farandole.training.engine.learner import Learner
from farandole.training.engine.replica import Recipe
from farandole.training.model.model import Transformer, build_model, language_loss

from ..report.section import Grid
from .report import OUT, BenchReport, Out, Write, open_bench

GPU: Final = torch.device("meta")
HOST: Final = torch.device("cpu")
_NO_DEVICE: Final = Device(GPU, None, "no device")
# Inner steps on a real GPU of which the fastest is reported.
_NUM_TIMED: Final = 5


class Held(NamedTuple):
    """Bytes on one device."""

    between: int
    """Between two inner steps."""
    most: int
    """At the peak, activations included."""


class MeasuredLoop(NamedTuple):
    """A model in training."""

    inner_step: Callable[[], object]
    end_round: Callable[[], object] = lambda: None
    """The end of a round as far as it is on the GPU."""


class Way(NamedTuple):
    """A way to train a model: the run, and a member's own settings."""

    manifest: Manifest
    is_plain: bool = False
    """Whether it is a loop without a node."""
    averages_on_host: bool = True
    is_lean: bool = False
    recomputes: bool = False

    def start(self, device: Device = _NO_DEVICE) -> MeasuredLoop:
        """Make the model there."""
        if self.is_plain:
            return plain_loop(self.manifest, device)
        return trainer(
            self.manifest,
            device,
            averages_on_host=self.averages_on_host,
            is_lean=self.is_lean,
            recomputes=self.recomputes,
        )

    @property
    def planned(self) -> int | None:
        """Return the peak on a GPU that `farandole.protocol.planning.needs` computes; None for a plain loop."""
        if self.is_plain:
            return None
        needs = needs_of(self.manifest, recomputes=self.recomputes)
        own = needs.memory(has_gpu=True, averages_on_gpu=not self.averages_on_host, is_lean=self.is_lean)
        return own.device


def ways_of(manifest: Manifest) -> dict[str, Way]:
    """Return the ways to train a run's model, by name."""
    muon = msgspec.structs.replace(manifest, inner=InnerConfig(optimizer="muon"))
    return {
        "a plain loop, AdamW": Way(manifest, is_plain=True),
        "a node with `--average-on-gpu`": Way(manifest, averages_on_host=False),
        "a node": Way(manifest),
        "a node with Muon": Way(muon),
        "a node with `--recompute`": Way(manifest, recomputes=True),
        "a node with `--lean`": Way(manifest, is_lean=True),
        "a node with `--lean` and Muon": Way(muon, is_lean=True),
        "a node with `--lean --recompute`": Way(manifest, is_lean=True, recomputes=True),
    }


class _NoText(Batches):
    """Batches of one sequence of zeros."""

    def __init__(self, context: int) -> None:
        super().__init__(np.zeros(0, np.int64), 1, context)

    def batch(self, step: int) -> Batch:
        """Return the same batch each time."""
        return np.zeros((1, self.context + 1), np.int64)


def plain_loop(manifest: Manifest, device: Device = _NO_DEVICE) -> MeasuredLoop:
    """Return a plain training loop: `torch.optim.AdamW`, all gradients kept."""
    where = device.torch_device
    module = _module_of(manifest.model, where)
    tokens = torch.zeros(1, manifest.model.context + 1, dtype=torch.long, device=where)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False, fused=where.type == "cuda")

    def step() -> None:
        with device.autocast():
            loss = language_loss(module, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return MeasuredLoop(step)


def trainer(
    manifest: Manifest,
    device: Device = _NO_DEVICE,
    *,
    averages_on_host: bool,
    is_lean: bool = False,
    recomputes: bool = False,
) -> MeasuredLoop:
    """Return the loop of a node's trainer."""
    learner = Learner(
        _module_of(manifest.model, device.torch_device),
        Recipe.of(manifest),
        _NoText(manifest.model.context),
        run_id=bytes(32),
        device=device,
        averages_on_host=averages_on_host,
        lean_author=bytes(32) if is_lean else None,
        recomputes=recomputes,
    )

    return MeasuredLoop(learner.learn, learner.round_end.contribution)


@torch.no_grad()
def _module_of(model: ModelConfig, device: torch.device) -> nn.Module:
    """Make a model on a device; on a real one with simpler initial weights, which a GPU draws within a second."""
    with device:
        module = Transformer(model)
    for parameter in module.parameters():
        parameter.normal_(0.0, 1 / math.sqrt(model.width)) if parameter.ndim > 1 else parameter.fill_(1.0)
    # The module has its device already, and on "meta" `Module.to` cannot exchange parameters.
    module.to = lambda *_, **__: module  # type: ignore[method-assign]
    return module


def held_by(way: Way) -> dict[torch.device, Held]:
    """Return the memory held by a way of training, counted without a GPU."""
    with FakeTensorMode(), MemTracker() as tracker:
        loop = way.start()
        loop.inner_step()
        loop.end_round()
        tracker.reset_mod_stats()
        loop.inner_step()
        loop.end_round()
        gc.collect()
        now, peak = (tracker.get_tracker_snapshot(kind) for kind in ("current", "peak"))
    return {
        device: Held(*(int(snapshot.get(device, {}).get("Total", 0)) for snapshot in (now, peak)))
        for device in (GPU, HOST)
    }


def measured_on(way: Way, device: Device) -> tuple[Held, float]:
    """Return the memory that PyTorch has allocated of a CUDA GPU, and the seconds of the fastest inner step there.

    Memory that was allocated before is not counted, such as cuBLAS' workspaces, which every process has once.
    """
    where = device.torch_device
    _free(where)
    before, seconds = torch.cuda.memory_allocated(where), []
    loop = way.start(device)
    loop.inner_step()
    loop.end_round()
    for _ in range(_NUM_TIMED):
        torch.cuda.synchronize(where)
        began = time.perf_counter()
        loop.inner_step()
        torch.cuda.synchronize(where)
        seconds.append(time.perf_counter() - began)
    _free(where)
    loop.inner_step()
    loop.end_round()
    torch.cuda.synchronize(where)
    most = torch.cuda.max_memory_allocated(where)
    gc.collect()
    return Held(torch.cuda.memory_allocated(where) - before, most - before), min(seconds)


def _free(device: torch.device) -> None:
    """Free what is garbage, and begin to look for the peak again."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)


def run(
    model: Annotated[str, typer.Option(help="A preset.")] = "125M",
    context: Annotated[int, typer.Option(min=1, help="Tokens of the one sequence.")] = 64,
    out: Out = OUT,
    write: Write = None,
    device: Annotated[str, typer.Option(help="meta: count tensors without a GPU; cuda: measure on this GPU.")] = "meta",
) -> None:
    """Count what a trainer holds of a GPU's memory and of the host's, next to a plain loop; no GPU is needed.

    Examples: [cyan]farandole testnet bench memory[/cyan];
    [cyan]farandole testnet bench memory --model 1B --context 1024[/cyan];
    [cyan]farandole testnet bench memory --device cuda --model 1B --context 1024[/cyan]
    """
    config = msgspec.structs.replace(preset(model), context=context)
    ways = ways_of(Manifest(name="memory", model=config, outer=NoLoCoConfig(codec="int8")))
    with FakeTensorMode(), GPU:
        num_parameters = sum(parameter.numel() for parameter in build_model(config, seed=0).parameters())
    if device == "meta":
        with open_bench("memory", out, write, model=model, context=context) as bench:
            held = {}
            for name, way in ways.items():
                held[name] = held_by(way)
                bench.say(name)
            bench.publish(report(bench.setting, num_parameters, held))
        return
    chosen = choose_device(device)
    with open_bench("memory", out, write, model=model, context=context, device=chosen.description) as bench:
        tiny = msgspec.structs.replace(preset("tiny"), context=context)
        for way in ways_of(Manifest(name="memory", model=tiny)).values():
            measured_on(way, chosen)  # what every process allocates once
        measured: dict[str, tuple[Held, float] | None] = {}
        for name, way in ways.items():
            bench.say(name)
            measured[name] = _measured_or_none(way, chosen)
        bench.publish(report_measured(bench.setting, num_parameters, ways, measured))


def _measured_or_none(way: Way, device: Device) -> tuple[Held, float] | None:
    """Call `measured_on`; None if the GPU has no room."""
    try:
        return measured_on(way, device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None


def report_measured(
    setting: dict[str, object],
    num_parameters: int,
    ways: dict[str, Way],
    measured: dict[str, tuple[Held, float] | None],
) -> BenchReport:
    """Return the table of a real GPU and its data."""
    rows, data = [], dict[str, Any]()
    for name, found in measured.items():
        planned = ways[name].planned
        if found is None:
            rows.append([name, *["out of memory"] * 2, *["-"] * 3])
            data[name] = None
            continue
        held, seconds = found
        sizes = [held.between, held.most, planned]
        shown = ["-" if size is None else f"{size / num_parameters:.2f}" for size in sizes]
        rows.append([name, *shown, f"{held.most / 1e9:.2f}", f"{1e3 * seconds:.1f}"])
        data[name] = {**held._asdict(), "planned": planned, "seconds": seconds}
    header = ["", "between inner steps", "peak", "planned peak", "peak, GB", "inner step, ms"]
    words = [
        "Bytes a parameter of the GPU's memory, by PyTorch's allocator; CUDA's context and cuBLAS' workspaces are not "
        "counted. *Peak*: with the activations of one sequence. *Planned peak*: as `farandole run plan` computes it. "
        "*Inner step*: of one sequence, the fastest."
    ]
    return BenchReport(setting, [Grid(f"{num_parameters:,} parameters", header, rows)], {"measured": data}, words)


def report(setting: dict[str, object], num_parameters: int, held: dict[str, dict[torch.device, Held]]) -> BenchReport:
    """Return the table and its data."""
    rows = [
        [name, *(f"{size / num_parameters:.2f}" for size in (*each[GPU], each[HOST].between))]
        for name, each in held.items()
    ]
    words = [
        "Bytes a parameter, in fp32 and int8 on the wire, with AdamW where nothing else is said. *Peak*: with the "
        "activations of one sequence. *Host*: slow weights, momentum and the vectors of an exchange. Not included "
        "there: the copy from which checkpoints are written (16 bytes), two contributions (2 in int8), and the test of "
        "a mean (4)."
    ]
    data = {name: {device.type: each[device]._asdict() for device in each} for name, each in held.items()}
    header = ["", "GPU, between inner steps", "GPU, peak", "host"]
    return BenchReport(setting, [Grid(f"{num_parameters:,} parameters", header, rows)], data, words)
