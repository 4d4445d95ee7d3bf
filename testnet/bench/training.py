"""The cost of an exchange to training: nodes that train and exchange, compared with plain loops on the same device.

The number of plain loops equals the number of nodes, and they run at once, so that both share the device alike; the
ratio is between the sums. A node's rate is the slope of its tokens over time, by least squares, from its second round
until the first node is done: it includes everything that keeps its trainer from inner steps, such as pauses and
exchanges.

Model FLOPs utilisation (PaLM, arXiv 2204.02311, appendix B): a token takes 6 N + 12 L T C floating-point operations (N
parameters, L layers, T tokens of context, C width), and the device's peak is its data sheet's for dense bf16.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import trio
import typer

from farandole.protocol.run.manifest import ModelConfig
from farandole.protocol.run.presets import num_parameters, preset

from ..play.launch import PlayView, Testnet
from ..play.live import open_view
from ..play.process import NodeProcess
from ..play.report import Merged
from ..play.scenario import Scenario
from .plain import EngineRate, PlainRate
from .process import ANSWER_TIMEOUT, BenchError, get_all, open_workers
from .report import OUT, Bench, BenchReport, Out, open_bench

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
    engine: EngineRate
    """Inner steps alone, without exchanges."""
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
) -> None:
    """Measure what exchanging costs training: two nodes on one device, and two plain PyTorch loops.

    Examples: [cyan]farandole testnet bench trainer --device cuda[/cyan];
    [cyan]farandole testnet bench trainer --device cpu --model 0.5M --rounds 4 --round-seconds 5[/cyan]
    """
    with open_bench("trainer", out) as bench:
        manifest = manifest_of_bench(model, batch_size, codec, round_seconds)
        rates = measure(bench, manifest, device, rounds, round_seconds, peak_tflops)
        bench.publish(BenchReport(bench.setting, [], msgspec.to_builtins(rates), [summary(rates)]))


def measure(
    bench: Bench, run: dict[str, Any], device: str, rounds: int, round_seconds: float, peak_tflops: float | None = None
) -> TrainingRates:
    """Measure plain loops, then nodes that exchange; the nodes' folders are in ``bench.out / "trainer"``.

    Raises `BenchError` if the nodes did not exchange, or there was too little to measure.
    """
    bench.say(f"inner steps of a node and of a plain loop, in {2 * ENGINE_TURNS} turns of {ENGINE_SECONDS:g} s")
    engine = _compare_steps(bench.log, run, device)
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
    plain_rate = sum(each.tokens_per_second for each in plain)
    peak = peak_tflops or peak_of(plain[0].device)
    return TrainingRates(
        device=plain[0].device,
        model=run["model"],
        num_parameters=num_parameters(model),
        codec=run["outer"]["codec"],
        rounds=rounds,
        round_seconds=round_seconds,
        exchanges=exchanges,
        plain_tokens_per_second=plain_rate,
        node_tokens_per_second=rate,
        ratio=rate / plain_rate,
        engine=engine,
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


def _compare_steps(log: Path, run: dict[str, Any], device: str) -> EngineRate:
    """Compare inner steps alone."""
    with open_workers("plain:PlainTrainer", ["inner steps"], log) as (worker,):
        worker.put("compare", run=run, device=device, turns=ENGINE_TURNS, seconds=ENGINE_SECONDS)
        return msgspec.convert(worker.get(ANSWER_TIMEOUT + 4 * ENGINE_TURNS * ENGINE_SECONDS), EngineRate)


def _run_plain(log: Path, run: dict[str, Any], device: str, warmup_seconds: float, seconds: float) -> list[PlainRate]:
    """Run all plain loops at once."""
    request = {"run": run, "device": device, "warmup_seconds": warmup_seconds, "seconds": seconds}
    with open_workers("plain:PlainTrainer", [f"plain loop {author}" for author in range(NUM_NODES)], log) as workers:
        for author, worker in enumerate(workers):
            worker.put("learn", author=author, **request)
        return msgspec.convert(get_all(workers, ANSWER_TIMEOUT + warmup_seconds + seconds), list[PlainRate])


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


def summary(rates: TrainingRates) -> str:
    """Return a summary of the rates in words."""
    mfu = "MFU unknown: pass --peak-tflops"
    if rates.plain_mfu is not None and rates.node_mfu is not None:
        mfu = f"MFU {rates.plain_mfu:.1%} and {rates.node_mfu:.1%} of {rates.peak_tflops:g} TFLOP/s"
    return (
        f"{rates.device}, {rates.model} ({rates.num_parameters:,} parameters), {rates.codec}: inner steps alone "
        f"{rates.engine.engine_tokens_per_second:,.0f} tokens/s, a plain loop's "
        f"{rates.engine.plain_tokens_per_second:,.0f} (ratio {rates.engine.ratio:.3f}); {NUM_NODES} plain loops "
        f"{rates.plain_tokens_per_second:,.0f} tokens/s, {NUM_NODES} nodes with {rates.exchanges // 2} exchanges "
        f"{rates.node_tokens_per_second:,.0f} tokens/s: ratio {rates.ratio:.3f}; {mfu}"
    )
