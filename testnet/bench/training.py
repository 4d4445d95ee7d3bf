"""The cost of an exchange to training: nodes that train and exchange, compared with plain loops on the same device.

The number of plain loops equals the number of nodes, and they run at once, so that both share the device alike; the
ratio is between the sums. A node's rate is the slope of its tokens over time, by least squares, from its second round
until the first node is done: it includes everything that keeps its trainer from inner steps, such as pauses and
exchanges.

Model FLOPs utilisation (PaLM, arXiv 2204.02311, appendix B): a token takes 6 N + 12 L T C floating-point operations (N
parameters, L layers, T tokens of context, C width), and the device's peak is its data sheet's for dense bf16.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import trio
import typer

from farandole.node.store.run_file import manifest_of
from farandole.protocol.run.manifest import ModelConfig
from farandole.protocol.run.models import num_parameters, preset
from farandole.training.base.device import choose_device

from ..play.launch import PlayView, Testnet
from ..play.live import open_view
from ..play.process import NodeProcess
from ..play.report import Merged
from ..play.scenario import Scenario
from ..report.section import Grid, cell
from .memory import GPU, Way, held_by
from .process import ANSWER_TIMEOUT, BenchError, get_all, open_workers
from .report import OUT, Bench, BenchReport, Claim, Out, Write, open_bench

NUM_NODES: Final = 2
# TFLOP/s for dense bf16 with fp32 sums, by a part of the device name in CUDA: NVIDIA's data sheets.
PEAK_TFLOPS: Final = {
    "B200": 2_250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}
# Turns of inner steps alone, of each kind.
ENGINE_TURNS: Final = 10
ENGINE_SECONDS: Final = 3.0
# Ends of a round that are timed, and the longest answer: a billion parameters on a slow disk.
END_TURNS: Final = 3
END_TIMEOUT: Final = 20 * ANSWER_TIMEOUT
# A slope through fewer is noise: statuses arrive once a second.
MIN_SAMPLES: Final = 5


class TrainingRates(msgspec.Struct, frozen=True):
    """Sums over the nodes, and over the plain loops. FLOPs and utilisation are the model's, without recomputation."""

    device: str
    model: str
    num_parameters: int
    codec: str
    rounds: int
    round_seconds: float
    exchanges: int
    """Committed exchanges of all nodes together; each is counted by both of its partners."""
    plain_tokens_per_second: float
    node_tokens_per_second: float
    ratio: float
    """The nodes' rate over the plain loops'."""
    engine_over_plain: float
    """Inner steps alone, without exchanges: the engine's rate over a plain loop's, in one process, in turns."""
    round_end: dict[str, float]
    """Seconds of each part of a round's end, in one trainer without a network."""
    bytes_per_parameter: tuple[float, float]
    """Peak memory of a GPU with one sequence, of a node and of a plain loop, counted without a GPU."""
    utilisation: list[float]
    """Utilisation of each node's trainer, by its own clock."""
    flops_per_token: float
    peak_tflops: float | None
    plain_mfu: float | None
    node_mfu: float | None


class _Samples:
    """A view that keeps (seconds, tokens) of each node while all train, and forwards to another view."""

    def __init__(self, view: PlayView) -> None:
        self._view = view
        self.of: dict[int, list[tuple[float, int]]] = defaultdict(list)

    def say(self, text: str) -> None:
        """Forward to the view."""
        self._view.say(text)

    def show(self, nodes: Sequence[NodeProcess], seconds: float, scenario: Scenario) -> None:
        """Sample a node when its tokens have changed, once all are past their first round and until one is done."""
        self._view.show(nodes, seconds, scenario)
        if any(node.record.round < 1 or node.record.is_finished for node in nodes):
            return
        for node in nodes:
            samples, tokens = self.of[node.record.index], node.record.tokens
            if not samples or samples[-1][1] != tokens:
                samples.append((seconds, tokens))


def run(
    out: Out = OUT,
    model: Annotated[str, typer.Option(help="A preset.")] = "125M",
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences an inner step.")] = 16,
    device: Annotated[str, typer.Option(help="As for farandole join.")] = "auto",
    codec: Annotated[str, typer.Option(help="How contributions are encoded.")] = "int8",
    rounds: Annotated[int, typer.Option(min=3, help="Rounds of each node.")] = 8,
    round_seconds: Annotated[float, typer.Option(min=1, help="Length of a round.")] = 20.0,
    peak_tflops: Annotated[
        float | None, typer.Option(min=0.001, help="The device's peak, dense bf16; known for some GPUs.")
    ] = None,
    write: Write = False,
) -> None:
    """Measure what exchanging costs training: two nodes on one device, and two plain PyTorch loops.

    Examples: [cyan]farandole testnet bench trainer --device cuda[/cyan];
    [cyan]farandole testnet bench trainer --device cpu --model 0.5M --rounds 4 --round-seconds 5[/cyan]
    """
    where = choose_device(device).torch_device.type
    name, title = ("trainer", "") if where == "cpu" else (f"trainer-{where}", "Training on a GPU")
    with open_bench(name, out, write, title=title) as bench:
        manifest = manifest_of_bench(model, batch_size, codec, round_seconds)
        rates = measure(bench, manifest, device, rounds, round_seconds, peak_tflops)
        bench.publish(report({**bench.setting, "device": rates.device}, rates))


def measure(
    bench: Bench, run: dict[str, Any], device: str, rounds: int, round_seconds: float, peak_tflops: float | None = None
) -> TrainingRates:
    """Measure plain loops, then nodes that exchange; the nodes' folders are in ``bench.out / "trainer"``.

    Raises `BenchError` if the nodes did not exchange, or there was too little to measure.
    """
    bench.say(f"inner steps of a node and of a plain loop, in {2 * ENGINE_TURNS} turns of {ENGINE_SECONDS:g} s")
    engine = _compare_steps(bench.log, run, device)
    bench.say("the end of a round")
    round_end = _end_rounds(bench, run, device)
    bench.say(f"{NUM_NODES} plain loops for {round_seconds * 2:g} s")
    plain = _run_plain(bench.log, run, device, warmup_seconds=round_seconds, seconds=2 * round_seconds)
    bench.close()
    scenario = msgspec.convert(
        {"run": run, "nodes": NUM_NODES, "rounds": rounds, "device": device, "min_partners": 1, "timeout": 3_600},
        Scenario,
    )
    folder = bench.out / "trainer"
    with open_view(bench.console) as view:
        samples = _Samples(view)
        report = trio.run(Testnet(scenario, folder.absolute(), samples, measure=_measure_nothing).play)
    exchanges = sum(node.exchanges_ok for node in report.nodes)
    if not exchanges:
        raise BenchError(f"the nodes never exchanged: see {folder / 'nodes'}")
    model = preset(run["model"])
    rate, flops = sum(map(slope, samples.of.values())), flops_per_token(model)
    plain_rate, plain_device = sum(each["tokens_per_second"] for each in plain), str(plain[0]["device"])
    peak = peak_tflops or peak_of(plain_device)
    return TrainingRates(
        device=plain_device,
        model=run["model"],
        num_parameters=num_parameters(model),
        codec=run["outer"]["codec"],
        rounds=rounds,
        round_seconds=round_seconds,
        exchanges=exchanges,
        plain_tokens_per_second=plain_rate,
        node_tokens_per_second=rate,
        ratio=rate / plain_rate,
        engine_over_plain=engine,
        round_end=round_end,
        bytes_per_parameter=_memory_of(run),
        utilisation=[node.utilisation for node in report.nodes if node.utilisation is not None],
        flops_per_token=flops,
        peak_tflops=peak,
        plain_mfu=None if peak is None else plain_rate * flops / (peak * 1e12),
        node_mfu=None if peak is None else rate * flops / (peak * 1e12),
    )


def manifest_of_bench(model: str, batch_size: int, codec: str, round_seconds: float) -> dict[str, Any]:
    """Return the settings of the run that both train, as in a run file."""
    return {
        "name": "bench-trainer",
        "model": model,
        "inner": {"batch_size": batch_size},
        "outer": {"codec": codec},
        "rounds": {"round_seconds": round_seconds, "exchange_seconds": round_seconds, "overlap": True},
    }


def _compare_steps(log: Path, run: dict[str, Any], device: str) -> float:
    """Compare inner steps alone: return the engine's rate over a plain loop's."""
    with open_workers("plain trainer", ["inner steps"], log) as (worker,):
        worker.put("compare", run=run, device=device, turns=ENGINE_TURNS, seconds=ENGINE_SECONDS)
        return float(worker.get(ANSWER_TIMEOUT + 4 * ENGINE_TURNS * ENGINE_SECONDS)["ratio"])


def _end_rounds(bench: Bench, run: dict[str, Any], device: str) -> dict[str, float]:
    """Return the median seconds of each part of a round's end, with a partner whose contribution equals ours."""
    checkpoint = bench.out / f"{bench.name}.checkpoint"
    try:
        with open_workers("ending trainer", ["a round's end"], bench.log) as (worker,):
            manifest = msgspec.to_builtins(manifest_of(run, Path(), 0.0))
            worker.put("begin", manifest=manifest, device=device, path=str(checkpoint))
            worker.get(END_TIMEOUT)
            turns = []
            for _ in range(END_TURNS + 1):  # the first one maps memory
                worker.put("play")
                turns.append(worker.get(END_TIMEOUT)["seconds"])
    finally:
        for leftover in bench.out.glob(f"{checkpoint.name}*"):
            leftover.unlink()
    return {part: statistics.median(turn[part] for turn in turns[1:]) for part in turns[0]}


def _memory_of(run: dict[str, Any]) -> tuple[float, float]:
    """Return the bytes a parameter that a node and a plain loop have on a GPU at their peak."""
    manifest = manifest_of(run, Path(), 0.0)
    node, plain = (held_by(Way(manifest, is_plain=is_plain))[GPU].most for is_plain in (False, True))
    number = num_parameters(manifest.model)
    return node / number, plain / number


def _run_plain(
    log: Path, run: dict[str, Any], device: str, warmup_seconds: float, seconds: float
) -> list[dict[str, Any]]:
    """Run all plain loops at once."""
    request = {"run": run, "device": device, "warmup_seconds": warmup_seconds, "seconds": seconds}
    with open_workers("plain trainer", [f"plain loop {author}" for author in range(NUM_NODES)], log) as workers:
        for author, worker in enumerate(workers):
            worker.put("learn", author=author, **request)
        return get_all(workers, ANSWER_TIMEOUT + warmup_seconds + seconds)


def _measure_nothing(*_: object) -> Merged:
    """Return zeros in place of the losses, which this benchmark does not need."""
    return Merged(0.0, 0.0, 0.0)


def slope(samples: Sequence[tuple[float, int]]) -> float:
    """Return tokens per second, by least squares; raises `BenchError` if there are too few samples."""
    if len(samples) < MIN_SAMPLES:
        raise BenchError(f"only {len(samples)} samples of a node's tokens: measure more, or longer, rounds")
    seconds, tokens = np.array(samples, dtype=np.float64).T
    return float(np.polyfit(seconds - seconds[0], tokens - tokens[0], 1)[0])


def flops_per_token(model: ModelConfig) -> float:
    """Return the FLOPs of the forward and the backward pass, with attention over the whole context."""
    return 6.0 * num_parameters(model) + 12.0 * model.num_layers * model.context * model.width


def peak_of(device: str) -> float | None:
    """Return the TFLOP/s of the device of this name, if it is known."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device), None)


def report(setting: Mapping[str, Any], rates: TrainingRates) -> BenchReport:
    """Return the table, claims and data."""
    size = f"{rates.num_parameters:,} parameters, {rates.codec}"
    nodes = f"{NUM_NODES} nodes with {rates.exchanges // 2} exchanges, tokens/s"
    mfu = [cell(each, "{:.1%}") for each in (rates.node_mfu, rates.plain_mfu)]
    ends = ", ".join(f"{part} {seconds:.2f}" for part, seconds in rates.round_end.items())
    node, plain = (f"{each:.2f}" for each in rates.bytes_per_parameter)
    claims = [
        Claim(f"inner steps of a node, over those of a plain PyTorch loop; {size}", f"{rates.engine_over_plain:.2f}"),
        Claim(
            f"{nodes}; theirs: as many plain loops at once",
            f"{rates.node_tokens_per_second:,.0f}",
            f"{rates.plain_tokens_per_second:,.0f}",
        ),
        *([Claim(f"utilisation of the device's {rates.peak_tflops:g} TFLOP/s", *mfu)] if rates.peak_tflops else []),
        Claim("peak bytes a parameter on a GPU, counted without one; theirs: a plain loop", node, plain),
        Claim("seconds of the parts of a round's end", ends),
    ]
    grid = Grid(
        "What exchanging costs training",
        ["", "ours", "theirs"],
        [[*msgspec.structs.astuple(claim)] for claim in claims],
    )
    return BenchReport(setting, [grid], msgspec.to_builtins(rates), claims=claims)
