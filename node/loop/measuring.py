"""``farandole run create --measure``: where to cut a run's model into stages, by measured times of its parts."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import msgspec
from rich.table import Table

from farandole.protocol.run.manifest import Manifest, ModelConfig
from farandole.protocol.run.models import Costs, cut_by_time, layers_of, parameter_costs
from farandole.protocol.wire.errors import ManifestError
from farandole.training.base.errors import TrainingError

from ..base.figures import count

# The default of `join --threads`.
THREADS = 1


class StageShare(msgspec.Struct, frozen=True):
    """A stage of a cut."""

    first_layer: int
    num_layers: int
    parameters: int
    time_share: float
    """The share of the time that all stages take for a microbatch, as measured."""


class MeasuredCut(msgspec.Struct, frozen=True):
    """The measured times, and the cut that follows from them."""

    device: str
    layer_seconds: float
    """The seconds for one microbatch, forward and backward."""
    ends_seconds: float
    by_time: tuple[StageShare, ...]
    """The cut that goes into the manifest."""
    by_count: tuple[StageShare, ...]
    """The cut without measuring."""


def cut_by_measuring(manifest: Manifest, allowed_models: Collection[str] = ()) -> tuple[Manifest, MeasuredCut]:
    """Set the manifest's ``model.stage_layers`` by measuring now; return it with the measurement. Takes seconds.

    Raises `ManifestError` if there is nothing to cut, the manifest has a cut already, or measuring fails.
    """
    if manifest.model.num_stages == 1:
        raise ManifestError("--measure: model.num_stages is 1, so there is nothing to cut")
    if manifest.model.stage_layers:
        raise ManifestError("--measure: model.stage_layers says already where to cut; leave it out to measure")
    model = manifest.model
    device, seconds = _measure(manifest, allowed_models)
    stages = cut_by_time(model, seconds)
    chosen = msgspec.structs.replace(manifest.model, stage_layers=tuple(map(len, stages)))
    measured = MeasuredCut(
        device,
        seconds.layers[0],
        seconds.ends,
        by_time=_shares(model, seconds, stages),
        by_count=_shares(model, seconds, layers_of(model)),
    )
    return msgspec.structs.replace(manifest, model=chosen), measured


def _measure(manifest: Manifest, allowed_models: Collection[str]) -> tuple[str, Costs]:
    """Return the device's name and the parts' times. Torch is imported here: commands without measuring need none."""
    import torch

    from farandole.training.base.device import choose_device
    from farandole.training.engine.measure import measure

    torch.set_num_threads(THREADS)
    try:
        device = choose_device()
        return device.description, measure(manifest.model, manifest.pipeline, device, allowed_models)
    except (TrainingError, RuntimeError) as error:  # torch raises RuntimeError for memory
        raise ManifestError(f"--measure: {error}") from error


def _shares(model: ModelConfig, seconds: Costs, stages: tuple[range, ...]) -> tuple[StageShare, ...]:
    times, parameters = seconds.of(stages), parameter_costs(model).of(stages)
    return tuple(
        StageShare(layers.start, len(layers), round(of_stage), time / sum(times))
        for layers, of_stage, time in zip(stages, parameters, times, strict=True)
    )


def cuts_table(measured: MeasuredCut) -> Table:
    """Show both cuts next to each other."""
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    columns = ("layers", "parameters", "time")
    for column in ("stage", *(f"{how}\n{column}" for how in ("by time", "by count") for column in columns)):
        table.add_column(column, justify="right", no_wrap=True)
    for stage, shares in enumerate(zip(measured.by_time, measured.by_count, strict=True)):
        table.add_row(str(stage), *itertools.chain.from_iterable(map(_cells, shares)))
    return table


def _cells(share: StageShare) -> tuple[str, str, str]:
    last = share.first_layer + share.num_layers - 1
    layers = f"{share.first_layer} to {last}" if share.num_layers > 1 else str(last) if share.num_layers else "none"
    return layers, count(share.parameters), f"{share.time_share:.1%}"
