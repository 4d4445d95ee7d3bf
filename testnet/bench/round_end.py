"""What each part of a round's end takes, by the size of the model and the codec: one trainer, and no network.

The partner's contribution equals this trainer's own, so nothing is clipped. No work is saved by that: a difference of
zero takes as long as any other. A copy of the weights in memory is the lower limit for a part that reads and writes
them once.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from farandole.node.store.run_file import manifest_of
from farandole.protocol.run.presets import preset

from ..report.section import Grid, cell
from .process import ANSWER_TIMEOUT, open_workers
from .report import OUT, Bench, BenchReport, Out, Write, open_bench

PARTS: Final = ("encode", "decode", "judge", "outer step", "save", "load", "copy of the weights")
# For the longest answer, of a billion parameters on a slow disk.
TURN_TIMEOUT: Final = 20 * ANSWER_TIMEOUT


class RoundEnd(msgspec.Struct, frozen=True):
    """One model with one codec; seconds are medians."""

    model: str
    codec: str
    num_parameters: int
    device: str
    contribution_bytes: int
    checkpoint_bytes: int
    peak_mb: float | None
    """Peak resident memory of the process, with the buffers of both contributions and the last copy."""
    seconds: dict[str, float]
    """By part: `PARTS`, and the inner step before."""


def run(
    models: Annotated[str, typer.Option(help="Presets, with commas between them.")] = "30M,125M,350M",
    codecs: Annotated[str, typer.Option(help="Codecs of contributions, with commas between them.")] = "int8",
    context: Annotated[int, typer.Option(min=2, help="Tokens of a sequence, of which a batch has one.")] = 16,
    turns: Annotated[int, typer.Option(min=1, help="Rounds of each; medians count.")] = 3,
    device: Annotated[str, typer.Option(help="As for farandole join.")] = "cpu",
    out: Out = OUT,
    write: Write = None,
) -> None:
    """Measure encoding, decoding, judging, the outer step and checkpoints (350M needs 20 GB of memory, and 6 of disk).

    Examples: [cyan]farandole testnet bench round-end[/cyan];
    [cyan]farandole testnet bench round-end --models 125M --codecs fp32,bf16,int8,int4[/cyan];
    [cyan]farandole testnet bench round-end --device cuda --models 1B[/cyan]
    """
    kinds = list(product(models.split(","), codecs.split(",")))
    manifests = [_manifest(model, codec, context) for model, codec in kinds]  # raises before anything is measured
    with open_bench("round-end", out, write, turns=turns, context=context, device=device) as bench:
        ends = [measure(bench, *kind, manifest, device, turns) for kind, manifest in zip(kinds, manifests, strict=True)]
        bench.publish(report(bench.setting, ends))


def _manifest(model: str, codec: str, context: int) -> dict[str, Any]:
    settings = msgspec.to_builtins(preset(model))
    manifest = {
        "name": "bench-round-end",
        "model": {**settings, "context": context},
        "inner": {"batch_size": 1},
        "outer": {"codec": codec},
    }
    manifest_of(manifest, Path(), 0.0)  # raises if values do not fit together
    return manifest


def measure(bench: Bench, model: str, codec: str, manifest: dict[str, Any], device: str, turns: int) -> RoundEnd:
    """Measure one model with one codec, in a process of its own. Raises `BenchError`."""
    folder = bench.out / bench.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        with open_workers("round_end_worker:RoundEndTrainer", [f"{model}, {codec}"], bench.log) as (worker,):
            bench.say(f"{model}, {codec}: building the model")
            worker.put("begin", manifest=manifest, device=device, path=str(folder / "checkpoint"))
            begun = worker.get(TURN_TIMEOUT)
            played = []
            for turn in range(turns + 1):  # the first one maps memory
                bench.say(f"{model}, {codec}: round {turn} of {turns}")
                worker.put("play")
                played.append(worker.get(TURN_TIMEOUT))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    timed = played[1:]
    last = played[-1]
    return RoundEnd(
        model=model,
        codec=codec,
        num_parameters=begun["num_parameters"],
        device=begun["device"],
        contribution_bytes=last["contribution_bytes"],
        checkpoint_bytes=last["checkpoint_bytes"],
        peak_mb=last["peak_mb"],
        seconds={part: statistics.median(each["seconds"][part] for each in timed) for part in last["seconds"]},
    )


def report(setting: dict[str, object], ends: Sequence[RoundEnd]) -> BenchReport:
    """Return the table and its data."""
    header = ["model", "codec", "contribution, MB", *(f"{part}, s" for part in PARTS)]
    header += ["checkpoint, GB", "peak memory, GB"]
    rows = [
        [
            f"{end.num_parameters / 1e6:.0f} M",
            end.codec,
            f"{end.contribution_bytes / 1e6:,.0f}",
            *(f"{end.seconds[part]:.2f}" for part in PARTS),
            f"{end.checkpoint_bytes / 1e9:.2f}",
            cell(None if end.peak_mb is None else end.peak_mb / 1e3, "{:.1f}"),
        ]
        for end in ends
    ]
    words = (
        "Medians, without fragments. *Encode*: with freezing the contribution. *Decode* and *judge* are done while "
        "the partner's contribution arrives, and after; the judgement includes losses on held-out text, as for "
        "a partner that was not met before. *Save*: until the checkpoint is durable, hashes included; *load*: with "
        "its hashes verified. *Copy of the weights*: 4 bytes a parameter from memory to memory."
    )
    return BenchReport(
        setting, [Grid("Parts of a round's end", header, rows, 2)], {"ends": msgspec.to_builtins(list(ends))}, [words]
    )
