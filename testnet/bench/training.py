"""What an exchange costs training: nodes that train and exchange on one device, beside plain loops on the same one.

As many plain loops run at once as there are nodes, so that both share the device alike; the ratio is between the sums.
A node's rate is the slope of its tokens over time, by least squares, from its second round until the first node is
done: it holds everything that keeps its trainer from inner steps, pauses and exchanges included.

Model FLOPs utilisation (PaLM, arXiv 2204.02311, appendix B): a token takes 6 N + 12 L T C floating-point operations (N
parameters, L layers, T tokens of context, C width), and the device's peak is that of its data sheet for dense bf16.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import trio
from rich.console import Console

from farandole.protocol.errors import FarandoleError
from farandole.protocol.manifest import ModelConfig
from farandole.protocol.presets import num_parameters, preset

from ..launch import PlayView, Testnet
from ..live import open_view
from ..process import NodeProcess
from ..report import Merged
from ..scenario import Scenario
from ..setting import setting
from .plain import PlainLoop, PlainRate

NUM_NODES: Final = 2
# Dense bf16 with fp32 sums, TFLOP/s, by a part of the name that CUDA gives: NVIDIA's data sheets.
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
# A slope through less is noise: statuses come once a second.
MIN_SAMPLES: Final = 5


class TrainingBenchError(FarandoleError):
    """Nothing could be measured; the message says why."""


class TrainingRates(msgspec.Struct, frozen=True):
    """Sums over the nodes, and over the plain loops. FLOPs and utilisation are of the model's, recomputation aside."""

    setting: dict[str, str | int | float]
    device: str
    model: str
    num_parameters: int
    codec: str
    rounds: int
    round_seconds: float
    exchanges: int
    """Committed, by all nodes together; each is counted by both of its partners."""
    plain_tokens_per_second: float
    node_tokens_per_second: float
    ratio: float
    """The nodes' over the plain loops'."""
    utilisation: list[float]
    """Of each node's trainer, by its own clock."""
    flops_per_token: float
    peak_tflops: float | None
    plain_mfu: float | None
    node_mfu: float | None


class _Samples:
    """A view that keeps (seconds, tokens) of each node while all train, and passes everything on."""

    def __init__(self, view: PlayView) -> None:
        self._view = view
        self.of: dict[int, list[tuple[float, int]]] = defaultdict(list)

    def say(self, text: str) -> None:
        """Passed on."""
        self._view.say(text)

    def show(self, nodes: Sequence[NodeProcess], seconds: float, scenario: Scenario) -> None:
        """A sample where a node's tokens have changed, once all are past their first round and until one is done."""
        self._view.show(nodes, seconds, scenario)
        if any(node.record.round < 1 or node.record.is_finished for node in nodes):
            return
        for node in nodes:
            samples, tokens = self.of[node.record.index], node.record.tokens
            if not samples or samples[-1][1] != tokens:
                samples.append((seconds, tokens))


def run_training_bench(
    out: Path,
    *,
    model: str,
    batch_size: int,
    device: str,
    codec: str,
    rounds: int,
    round_seconds: float,
    peak_tflops: float | None,
) -> TrainingRates:
    """Measure, print, and write ``trainer.json`` and the nodes' folders into ``out``.

    Raises `TrainingBenchError` if the nodes did not exchange, or there was too little to measure.
    """
    console, origin = Console(), setting()
    run = _run(model, batch_size, codec, round_seconds)
    with console.status(f"{NUM_NODES} plain loops for {round_seconds * 2:g} s"):
        plain = _run_plain(run, device, warmup_seconds=round_seconds, seconds=2 * round_seconds)
    scenario = msgspec.convert(
        {"run": run, "nodes": NUM_NODES, "rounds": rounds, "device": device, "min_partners": 1, "timeout": 3_600},
        Scenario,
    )
    with open_view(console) as view:
        samples = _Samples(view)
        testnet = Testnet(scenario, (out / "trainer").absolute(), samples, measure=_measure_nothing)
        report = trio.run(testnet.play)
    exchanges = sum(node.exchanges_ok for node in report.nodes)
    if not exchanges:
        raise TrainingBenchError(f"the nodes never exchanged: see {out / 'trainer' / 'nodes'}")
    rate, flops = sum(map(slope, samples.of.values())), flops_per_token(preset(model))
    plain_rate = sum(each.tokens_per_second for each in plain)
    peak = peak_tflops or peak_of(plain[0].device)
    rates = TrainingRates(
        setting=origin,
        device=plain[0].device,
        model=model,
        num_parameters=num_parameters(preset(model)),
        codec=codec,
        rounds=rounds,
        round_seconds=round_seconds,
        exchanges=exchanges,
        plain_tokens_per_second=plain_rate,
        node_tokens_per_second=rate,
        ratio=rate / plain_rate,
        utilisation=[node.utilisation for node in report.nodes if node.utilisation is not None],
        flops_per_token=flops,
        peak_tflops=peak,
        plain_mfu=None if peak is None else plain_rate * flops / (peak * 1e12),
        node_mfu=None if peak is None else rate * flops / (peak * 1e12),
    )
    (out / "trainer.json").write_bytes(msgspec.json.format(msgspec.json.encode(rates), indent=2) + b"\n")
    console.print(summary(rates), highlight=False, soft_wrap=True)
    return rates


def _run(model: str, batch_size: int, codec: str, round_seconds: float) -> dict[str, Any]:
    return {
        "name": "bench-trainer",
        "model": model,
        "inner": {"batch_size": batch_size},
        "outer": {"codec": codec},
        "rounds": {"round_seconds": round_seconds, "exchange_seconds": round_seconds, "overlap": True},
    }


def _run_plain(run: dict[str, Any], device: str, warmup_seconds: float, seconds: float) -> list[PlainRate]:
    """All at once."""
    command = [sys.executable, "-m", "farandole.testnet.bench.plain"]
    processes = [
        subprocess.Popen(
            [*command, msgspec.json.encode(PlainLoop(run, device, warmup_seconds, seconds, author))],
            stdout=subprocess.PIPE,
        )
        for author in range(NUM_NODES)
    ]
    try:
        outputs = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        raise TrainingBenchError("a plain loop failed: its error stands above")
    return [msgspec.json.decode(output, type=PlainRate) for output in outputs]


def _measure_nothing(*_: object) -> Merged:
    """How well the nodes learn is not the question."""
    return Merged(0.0, 0.0, 0.0)


def slope(samples: Sequence[tuple[float, int]]) -> float:
    """Tokens a second, by least squares; raises `TrainingBenchError` if there are too few."""
    if len(samples) < MIN_SAMPLES:
        raise TrainingBenchError(f"only {len(samples)} samples of a node's tokens: measure more, or longer, rounds")
    seconds, tokens = np.array(samples, dtype=np.float64).T
    return float(np.polyfit(seconds - seconds[0], tokens - tokens[0], 1)[0])


def flops_per_token(model: ModelConfig) -> float:
    """Of the forward and the backward pass, the attention over the whole context included."""
    return 6.0 * num_parameters(model) + 12.0 * model.num_layers * model.context * model.width


def peak_of(device: str) -> float | None:
    """TFLOP/s of the device of this name, if it is known."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device), None)


def summary(rates: TrainingRates) -> str:
    """What a person reads."""
    mfu = "MFU unknown: say --peak-tflops"
    if rates.plain_mfu is not None and rates.node_mfu is not None:
        mfu = f"MFU {rates.plain_mfu:.1%} and {rates.node_mfu:.1%} of {rates.peak_tflops:g} TFLOP/s"
    return (
        f"{rates.device}, {rates.model} ({rates.num_parameters:,} parameters), {rates.codec}: {NUM_NODES} plain loops "
        f"{rates.plain_tokens_per_second:,.0f} tokens/s, {NUM_NODES} nodes with {rates.exchanges // 2} exchanges "
        f"{rates.node_tokens_per_second:,.0f} tokens/s: ratio {rates.ratio:.3f}; {mfu}"
    )
