"""How good NoLoCo is beside synchronous training, DiLoCo and no averaging at all, on the same tokens.

Every replica has text of its own kind: the largest packages of Python's standard library, one each (`encodings` is
tables of characters, `pydoc_data` prose, `tkinter` an interface to windows, and so on). The last tenth of each is held
out, and every model is measured on all of them alike. So replicas that do not average know little of the others' text,
and the comparison shows what averaging is worth.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from farandole.protocol.manifest import InnerConfig, ModelConfig
from farandole.training.baselines import Ensemble, Method, methods, train
from farandole.training.data import Sampler, Text
from farandole.training.errors import DataError
from farandole.training.sources import Reader, stdlib_sources
from farandole.training.token_cache import Found

from .grid import Grid
from .section import Section, compose
from .setting import setting

# 41 k parameters: the setting of the measurements that BENCHMARKS.md compares with.
MODEL = ModelConfig(num_layers=2, width=32, num_heads=2, hidden=128, context=32, vocabulary=256)
LEARNING_RATE = 3e-3
BATCH_SIZE = 16
HELD_OUT_SHARE = 0.1
# Of each kind of text; with 8 kinds 32,768 tokens in all, which measures a loss to about 0.01.
VALIDATION_BATCHES = 8

Progress = Callable[[str, int, int], None]
"""Called with (method, seed, inner steps done)."""


@dataclass(frozen=True, slots=True)
class Result:
    """One method with one seed."""

    method: str
    seed: int
    loss: float
    """Mean over replicas, nats a byte, on everybody's held-out text."""
    merged_loss: float
    """Of the mean of all replicas' weights."""
    spread: float
    """See `Ensemble.spread`."""
    seconds: float


def choose_methods(words: Sequence[str], interval: int = 10) -> list[Method]:
    """The methods whose names have one of the words in them; all of them without words.

    Raises `DataError`, which names those there are, if a word is in no name.
    """
    every = methods(interval)
    for word in words:
        if not any(word in method.name for method in every):
            raise DataError(f"no method is called {word!r}; there are {'; '.join(method.name for method in every)}")
    return [method for method in every if not words or any(word in method.name for word in words)]


def run_compare(
    nodes: int = 8,
    steps: int = 2_000,
    seeds: int = 3,
    out: Path | None = None,
    interval: int = 10,
    words: Sequence[str] = (),
    section: Section | None = None,
) -> list[Result]:
    """Train with every method and seed, on one thread, with progress and a table on the terminal.

    It takes about 20 minutes a seed with the defaults. ``out`` is a JSON file, written as it goes; at the end the
    ``section`` is written. Raises `DataError` if the standard library has fewer packages than there are nodes, or as
    `choose_methods` does; `SectionError`.
    """
    if section is not None:
        section.check()
    chosen, texts = choose_methods(words, interval), texts_by_kind(nodes)
    torch.set_num_threads(1)
    console = Console()
    measured = {**setting(), "nodes": nodes, "steps": steps, "seeds": seeds, "interval": interval}
    results = []
    with console.status("starting") as status:

        def show(method: str, seed: int, step: int) -> None:
            status.update(f"seed {seed + 1} of {seeds}: {method}, step {step} of {steps}")

        for seed, method in itertools.product(range(seeds), chosen):
            results.append(_measure(method, texts, steps, seed, show))
            if out is not None:
                document = {"settings": {**measured, "kinds": [*texts]}, "results": [asdict(each) for each in results]}
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(document, indent=2) + "\n")
    grid = result_grid(results)
    console.print(grid.rich())
    if section is not None:
        section.write(compose(measured, grid.markdown()))
    return results


def texts_by_kind(num_kinds: int) -> dict[str, Text]:
    """The largest packages of the standard library, by name, each split into its first nine tenths and its last."""
    packages: dict[str, list[bytes]] = defaultdict(list)
    for document in Reader(stdlib_sources(), ""):
        package, separator, _ = document.name.partition("/")
        if separator:
            packages[package].append(document.text)
    if num_kinds > len(packages):
        raise DataError(f"the standard library has {len(packages)} packages, too few for {num_kinds} nodes")
    largest = sorted(packages, key=lambda name: (-sum(map(len, packages[name])), name))[:num_kinds]
    return {name: _split(packages[name]) for name in largest}


def _split(documents: Sequence[bytes]) -> Text:
    tokens = np.frombuffer(b"\0".join(documents), dtype=np.uint8)
    cut = int(len(tokens) * (1 - HELD_OUT_SHARE))
    return Text(tokens[:cut], tokens[cut:], Found(len(documents), int(tokens.max()), b""))


def _measure(method: Method, texts: dict[str, Text], steps: int, seed: int, progress: Progress) -> Result:
    inner = InnerConfig(learning_rate=LEARNING_RATE, warmup_steps=steps // 20, total_steps=steps, batch_size=BATCH_SIZE)
    run_id = seed.to_bytes(32, "little")
    samplers = [
        Sampler(text, run_id=run_id, author=name.encode(), batch_size=BATCH_SIZE, context=MODEL.context)
        for name, text in texts.items()
    ]
    started = time.perf_counter()
    ensemble = train(method, MODEL, inner, samplers, steps, seed, lambda step: progress(method.name, seed, step))
    seconds = time.perf_counter() - started
    loss, spread, merged_loss = _evaluate(ensemble, samplers)
    return Result(method.name, seed, loss, merged_loss, spread, seconds)


def _evaluate(ensemble: Ensemble, samplers: Sequence[Sampler]) -> tuple[float, float, float]:
    """(loss, spread, loss of the merged model); merges the ensemble."""
    batches = [sampler.held_out_batch(index) for sampler in samplers for index in range(VALIDATION_BATCHES)]
    loss, spread = float(ensemble.losses(batches).mean()), ensemble.spread()
    ensemble.merge()
    return loss, spread, float(ensemble.losses(batches)[0])


def result_grid(results: Sequence[Result]) -> Grid:
    """The methods in rows: means over seeds, with the standard deviation of the loss."""
    by_method: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_method[result.method].append(result)
    rows = []
    for method, group in by_method.items():
        losses = [result.loss for result in group]
        deviation = statistics.stdev(losses) if len(losses) > 1 else 0.0
        rows.append(
            [
                method,
                str(len(group)),
                f"{statistics.mean(losses):.3f} ± {deviation:.3f}",
                f"{math.exp(statistics.mean(losses)):.2f}",
                f"{math.exp(statistics.mean(result.merged_loss for result in group)):.2f}",
                f"{statistics.mean(result.spread for result in group):.2%}",
            ]
        )
    header = ["method", "seeds", "loss", "ppl", "ppl, merged", "spread"]
    return Grid("NoLoCo beside the baselines, loss in nats a byte", header, rows)
