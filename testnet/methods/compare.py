"""A comparison of NoLoCo with synchronous training, DiLoCo and no averaging at all, on the same tokens.

Every replica has text of its own kind: the largest packages of Python's standard library, one each (`encodings` is
tables of characters, `pydoc_data` prose, `tkinter` an interface to windows, and so on). The last tenth of each is held
out, and every model is evaluated on all of them. So replicas that do not average know little of the others' text, and
the comparison shows the benefit of averaging.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from dataclasses import replace as replaced
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from rich.console import Console

from farandole.protocol.run.manifest import InnerConfig, ModelConfig
from farandole.protocol.run.models import num_parameters, preset
from farandole.training.base.device import Device, choose_device
from farandole.training.base.durable import replacing
from farandole.training.base.errors import DataError
from farandole.training.data.batches import Found, joined
from farandole.training.data.dataset import Sampler, Text
from farandole.training.data.sources import Reader, sources_of, stdlib_sources

from ..report.section import Grid, setting
from ..simulate.plays import play_all
from .baselines import Method, Trial, methods
from .stacked import Stack, train

# 41 k parameters: the setting of the measurements that BENCHMARKS.md compares with.
MODEL = ModelConfig(num_layers=2, width=32, num_heads=2, hidden=128, context=32, vocabulary=256)
LEARNING_RATE = 3e-3
BATCH_SIZE = 16
HELD_OUT_SHARE = 0.1
# Of a record that `write_kinds` writes: a few windows of text.
RECORD_CHARACTERS = 1_024
# For each kind of text; with 8 kinds these are 32,768 tokens, which measure a loss to about 0.01.
VALIDATION_BATCHES = 8
# Points of a loss curve: evaluating them takes a few percent of the time.
CURVE_POINTS = 20
# Rates are chosen with a seed that no figure is from.
TUNING_SEED = 1_000
# Settings that results have in common, so that one file may have them all.
_SAME_SETTINGS = ("nodes", "steps", "interval", "parameters", "kinds", "torch", "device")
# Of Student's t with 1, 2, ... degrees of freedom: 95 % lie within plus and minus this.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


class Play(NamedTuple):
    """One training of the comparison."""

    method: str
    seed: int
    rate: float
    """Factor of the learning rate."""

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.method}, seed {self.seed}, rate x {self.rate:g}"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one method with one seed."""

    method: str
    seed: int
    rate: float
    """Factor of the learning rate."""
    loss: float
    """Mean over replicas, in nats per byte, on the held-out text of all kinds."""
    merged_loss: float
    """Loss of the mean of all replicas' weights."""
    spread: float
    """See `Stack.spreads`."""
    seconds: float
    curve: tuple[tuple[int, float], ...] = ()
    """Loss by inner step, on one batch of each kind of held-out text: coarser than ``loss``."""


def choose_methods(words: Sequence[str], interval: int = 10) -> list[Method]:
    """Return the methods with one of these names, or whose names contain one of the words; all of them without words.

    Raises `DataError` if a word is in no name.
    """
    every = methods(interval)
    chosen = set[str]()
    for word in words:
        names = [method.name for method in every if word == method.name]
        names = names or [method.name for method in every if word in method.name]
        if not names:
            raise DataError(f"no method is called {word!r}; `--methods list` lists all")
        chosen.update(names)
    return [method for method in every if not words or method.name in chosen]


@dataclass(frozen=True, slots=True)
class MethodComparison:
    """The settings of a comparison."""

    nodes: int = 8
    steps: int = 2_000
    seeds: int = 3
    interval: int = 10
    words: Sequence[str] = ()
    """Words of the methods' names; empty: all methods."""
    rates: Sequence[float] = (1.0,)
    """Factors of the learning rate. Of several, each method gets the one that is best for it with another seed."""
    baseline: str = "DiLoCo"
    """The method that others are compared with, seed by seed, if it is among them."""
    model: str = ""
    """A preset; empty: `MODEL`."""
    text: Path | None = None
    """A folder with a subfolder for each kind of text; None: the standard library."""
    is_mixed: bool = False
    """Whether each replica trains on the text of all kinds, instead of on one kind."""
    device: str = "cpu"
    """``cpu``: each training is a process with one thread; else all seeds and rates of a method are trained at once."""

    @property
    def setting(self) -> dict[str, object]:
        """Return the settings for a document."""
        return {
            "nodes": self.nodes,
            "steps": self.steps,
            "seeds": self.seeds,
            "interval": self.interval,
            "rates": ", ".join(f"{rate:g}" for rate in self.rates),
            "parameters": num_parameters(self.sizes),
            "device": self.chosen_device.description,
        }

    @property
    def chosen_device(self) -> Device:
        """Return the device; raises `TrainingError` if there is none of that name."""
        return choose_device(self.device)

    def inner(self) -> InnerConfig:
        """Return the settings of the inner optimizer, which a method's and a rate change."""
        return InnerConfig(
            learning_rate=LEARNING_RATE,
            warmup_steps=self.steps // 20,
            total_steps=self.steps,
            batch_size=BATCH_SIZE,
        )

    def samplers(self, texts: Mapping[str, Text], seed: int) -> list[Sampler]:
        """Return the batches of each replica."""
        return [
            Sampler(
                text,
                run_id=seed.to_bytes(32, "little"),
                author=name.encode(),
                batch_size=BATCH_SIZE,
                context=self.sizes.context,
            )
            for name, text in texts.items()
        ]

    def is_curve_point(self, step: int) -> bool:
        """Return whether loss curves have a point after this inner step: at the end of a round, or of all.

        In the middle of a round replicas are apart, and the further apart the longer the round is.
        """
        is_due = step * CURVE_POINTS // self.steps > (step - self.interval) * CURVE_POINTS // self.steps
        return step == self.steps or (step % self.interval == 0 and is_due)

    @property
    def sizes(self) -> ModelConfig:
        """Return the model, with sequences that are short enough for many replicas on a CPU."""
        return replace(preset(self.model), context=MODEL.context) if self.model else MODEL


def run_compare(comparison: MethodComparison, out: Path | None = None) -> list[Result]:
    """Train with every method and seed, with progress and a table on the terminal.

    With the defaults a method takes some ten minutes per seed and core. ``out`` is a JSON file, updated after each
    result; the results that it already has are not repeated. Raises `DataError` if there are fewer kinds of text than
    nodes, if ``out`` is of another comparison, or as `choose_methods` does; `TrainingError` if there is no such device,
    or a method cannot be trained on it; `ManifestError` for an unknown preset.
    """
    chosen = choose_methods(comparison.words, comparison.interval)
    texts = texts_by_kind(comparison.nodes, comparison.text)
    texts = mixed(texts) if comparison.is_mixed else texts
    console = Console()
    measured = {**setting(), **comparison.setting, "kinds": [*(["mixed"] if comparison.is_mixed else []), *texts]}
    results = _earlier_results(out, measured) if out is not None else {}

    def keep(_: object, made: Sequence[Result]) -> None:
        results.update({Play(result.method, result.seed, result.rate): result for result in made})
        if out is not None:
            document = {"settings": measured, "results": [asdict(each) for each in results.values()]}
            out.parent.mkdir(parents=True, exist_ok=True)
            with replacing(out) as file:
                file.write((json.dumps(document, indent=2) + "\n").encode())

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    def play(plays: Iterable[tuple[Method, int]]) -> list[Result]:
        asked = {Play(method.name, seed, method.rate): (method, seed) for method, seed in plays}
        missing = {key: each for key, each in asked.items() if key not in results}
        if comparison.chosen_device.torch_device.type == "cpu":
            play_all(say, [(key, partial(measure, comparison, [each], texts)) for key, each in missing.items()], keep)
        else:
            for name, group in groupby(missing, attrgetter("method")):
                keep(name, measure(comparison, [missing[key] for key in group], texts, say))
        return [results[key] for key in asked]

    tried = [replaced(method, rate=rate) for method in chosen for rate in comparison.rates]
    chosen = best_of(tried, play((method, TUNING_SEED) for method in tried)) if len(comparison.rates) > 1 else tried
    final = play((method, seed) for method in chosen for seed in range(comparison.seeds))
    console.print(result_grid(final, chosen, comparison.baseline).rich())
    return final


def _earlier_results(path: Path, measured: Mapping[str, object]) -> dict[Play, Result]:
    """Return the results in the file of a comparison that was interrupted or had fewer methods, seeds or rates."""
    try:
        document = json.loads(path.read_bytes())
        differing = [name for name in _SAME_SETTINGS if document["settings"][name] != measured[name]]
        results = [Result(**fields) for fields in document["results"]]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no file of a comparison: remove it, or name another folder with --out") from error
    if differing:
        raise DataError(f"{path} is of a comparison with other {differing[0]}: name another folder with --out")
    return {Play(result.method, result.seed, result.rate): result for result in results}


def best_of(tried: Sequence[Method], results: Sequence[Result]) -> list[Method]:
    """Return each method with the rate of its lowest loss, in the order of ``tried``."""
    losses = {(result.method, result.rate): result.loss for result in results}
    best: dict[str, Method] = {}
    for method in tried:
        known = best.get(method.name)
        if known is None or losses[method.name, method.rate] < losses[known.name, known.rate]:
            best[method.name] = method
    return list(best.values())


def documents_by_kind(num_kinds: int, folder: Path | None = None) -> dict[str, list[bytes]]:
    """Return the documents in the largest subfolders of a folder, by default of the standard library.

    Raises `DataError` if there are too few.
    """
    packages: dict[str, list[bytes]] = defaultdict(list)
    for document in Reader(stdlib_sources() if folder is None else sources_of([folder]), ""):
        package, separator, _ = document.name.partition("/")
        if separator:
            packages[package].append(document.text)
    if num_kinds > len(packages):
        where = "the standard library" if folder is None else folder
        raise DataError(f"{where} has {len(packages)} kinds of text, too few for {num_kinds} nodes")
    largest = sorted(packages, key=lambda name: (-sum(map(len, packages[name])), name))[:num_kinds]
    return {name: packages[name] for name in largest}


def texts_by_kind(num_kinds: int, folder: Path | None = None) -> dict[str, Text]:
    """Return these kinds of text: nine tenths to train on, and the rest; raises as `documents_by_kind` does."""
    texts = {}
    for name, documents in documents_by_kind(num_kinds, folder).items():
        tokens = np.frombuffer(b"\0".join(documents), dtype=np.uint8)
        cut = int(len(tokens) * (1 - HELD_OUT_SHARE))
        texts[name] = Text(tokens[:cut], tokens[cut:], Found(len(documents), int(tokens.max()), b""))
    return texts


def write_kinds(folder: Path, num_kinds: int) -> list[Path]:
    """Write kinds of text into a folder, each a file of records, for members that bring text; return the files.

    Records are short, so that every kind has some that are held out.
    """
    paths = []
    for name, documents in documents_by_kind(num_kinds).items():
        text = b"\n".join(documents).decode(errors="replace")
        pieces = (text[start : start + RECORD_CHARACTERS] for start in range(0, len(text), RECORD_CHARACTERS))
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
        paths.append(path)
    return paths


def mixed(texts: Mapping[str, Text]) -> dict[str, Text]:
    """Return texts of which each has the training text of all kinds, and what is held out of its own."""
    training = joined([text.training for text in texts.values()])
    return {name: Text(training, text.held_out, text.found) for name, text in texts.items()}


def measure(
    comparison: MethodComparison,
    plays: Sequence[tuple[Method, int]],
    texts: Mapping[str, Text],
    say: Callable[[str], None] = lambda text: None,
) -> list[Result]:
    """Train with one method, all seeds and rates at once; each result's seconds are its share of the time.

    On a CPU it takes one thread. ``say`` gets the progress at each point of the loss curves.
    """
    device = comparison.chosen_device.torch_device
    trials = [Trial(seed, method.rate, comparison.samplers(texts, seed)) for method, seed in plays]
    method, samplers = plays[0][0], trials[0].samplers  # the held-out text is the same for all
    few = [sampler.held_out_batch(0) for sampler in samplers]
    curves: list[list[tuple[int, float]]] = [[] for _ in trials]
    started = time.perf_counter()
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.set_float32_matmul_precision("high")  # TF32, which is more exact than the bf16 of a node on a GPU
    stack = Stack(method, comparison.sizes, comparison.inner(), trials, device)

    def watch(step: int) -> None:
        if comparison.is_curve_point(step):
            losses = stack.losses(few)
            for curve, loss in zip(curves, losses, strict=True):
                curve.append((step, loss))
            spent = f"step {step} of {comparison.steps}, {time.perf_counter() - started:.0f} s"
            say(f"{method.name}, {len(trials)} trials: {spent}, loss {min(losses):.3f} to {max(losses):.3f}")

    train(method, stack, trials, comparison.steps, watch)
    batches = [sampler.held_out_batch(index) for sampler in samplers for index in range(VALIDATION_BATCHES)]
    losses, spreads = stack.losses(batches), stack.spreads()
    seconds = (time.perf_counter() - started) / len(trials)
    stack.merge()
    return [
        Result(method.name, trial.seed, trial.rate, loss, merged_loss, spread, seconds, tuple(curve))
        for trial, loss, merged_loss, spread, curve in zip(
            trials, losses, stack.losses(batches), spreads, curves, strict=True
        )
    ]


def result_grid(results: Sequence[Result], chosen: Sequence[Method], baseline: str) -> Grid:
    """Return a table with a row per method: means over seeds, with the standard deviation of the loss.

    Differences from the baseline's loss are of the same seeds, with the 95 % interval of their mean.
    """
    by_method: dict[str, dict[int, Result]] = defaultdict(dict)
    for result in results:
        by_method[result.method][result.seed] = result
    rows = []
    for method in chosen:
        group = by_method[method.name]
        losses = [result.loss for result in group.values()]
        deviation = statistics.stdev(losses) if len(losses) > 1 else 0.0
        base = by_method.get(baseline, {})
        differences = [group[seed].loss - base[seed].loss for seed in group if seed in base]
        rows.append(
            [
                method.name,
                f"{method.rate:g}",
                f"{method.traffic:.3f}",
                str(len(group)),
                f"{statistics.mean(losses):.3f} ± {deviation:.3f}",
                "" if method.name == baseline else interval_of(differences),
                f"{math.exp(statistics.mean(losses)):.2f}",
                f"{math.exp(statistics.mean(result.merged_loss for result in group.values())):.2f}",
                f"{statistics.mean(result.spread for result in group.values()):.2%}",
            ]
        )
    header = ["method", "rate", "bytes", "seeds", "loss", f"less {baseline}'s", "ppl", "ppl, merged", "spread"]
    return Grid("NoLoCo and the baselines, loss in nats a byte", header, rows)


def interval_of(differences: Sequence[float]) -> str:
    """Return the mean of paired differences and its 95 % interval (Student's t) in words; empty without any."""
    if not differences:
        return ""
    mean = statistics.mean(differences)
    if len(differences) == 1:
        return f"{mean:+.3f}"
    quantile = T_QUANTILES[min(len(differences) - 1, len(T_QUANTILES)) - 1]
    half = quantile * statistics.stdev(differences) / math.sqrt(len(differences))
    return f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]"
