"""A comparison of NoLoCo with synchronous training, DiLoCo and no averaging at all, on the same tokens.

Every replica has text of its own kind: the largest packages of Python's standard library, one each (`encodings` is
tables of characters, `pydoc_data` prose, `tkinter` an interface to windows, and so on). A tenth of the documents of
each is held out, and every model is evaluated on windows of all of them that are nowhere in the training text. So
replicas that do not average know little of the others' text, and the comparison shows the benefit of averaging.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from dataclasses import replace as replaced
from functools import partial
from hashlib import sha256
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace
from rich.console import Console

from farandole.protocol.run.manifest import InnerConfig, ModelConfig
from farandole.protocol.run.models import num_parameters, preset
from farandole.training.base.device import choose_device
from farandole.training.base.durable import replacing
from farandole.training.base.errors import DataError
from farandole.training.data.batches import Batch, Found, Tokens, cut_out, draw
from farandole.training.data.dataset import Sampler, Text
from farandole.training.data.sources import documents_in, sources_of, stdlib_sources
from farandole.training.inner.optimizer import matrices_of
from farandole.training.model.model import build_model

from ..report.section import Grid, setting
from ..simulate.plays import play_all
from .baselines import Method, Trial, methods, searched
from .stacked import Stack, train

# 41 k parameters: the setting of the measurements that BENCHMARKS.md compares with.
MODEL = ModelConfig(num_layers=2, width=32, num_heads=2, hidden=128, context=32, vocabulary=256)
LEARNING_RATE = 3e-3
BATCH_SIZE = 16
HELD_OUT_SHARE = 0.1
# Text is cut into pieces of so many bytes, each of which is trained on or held out.
PIECE_BYTES = 4_096
# Of each kind of text: more than 5,000 inner steps read, and little to load. The pieces are those of least hashes.
KIND_BYTES = 4 << 20
# Windows of each kind of held-out text; with 8 kinds these are 65,536 tokens.
VALIDATION_WINDOWS = 256
# An odd number, by which a window's bytes are hashed.
_HASH_FACTOR = 0x9E3779B97F4A7C15
# Rates are chosen with a seed that no figure is from.
TUNING_SEED = 1_000
# Settings that results have in common, so that one file may have them all.
_SAME_SETTINGS = ("nodes", "steps", "interval", "parameters", "kinds", "torch", "device")
# Of Student's t with 1, 2, ... degrees of freedom: 95 % lie within plus and minus this.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


Key = tuple[str, int, float]
"""One training of the comparison: its method, its seed, and the factor of the learning rate."""


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

    @property
    def key(self) -> Key:
        """Return the training that it is of."""
        return self.method, self.seed, self.rate


def choose_methods(words: Sequence[str], interval: int = 10) -> list[Method]:
    """Return the methods with one of these names, or whose names contain one of the words; all of them without words.

    Those that a search tries come only by their names. Raises `DataError` if a word is in no name.
    """
    every = [*methods(interval), *(searched(interval) if "search" in " ".join(words) else ())]
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
    """The settings of a comparison: the options of `farandole testnet compare`, whose help says what they are."""

    nodes: int = 8
    steps: int = 2_000
    seeds: int = 3
    interval: int = 10
    words: Sequence[str] = ()
    rates: Sequence[float] = (1.0,)
    baseline: str = "DiLoCo"
    model: str = ""
    text: Path | None = None
    is_mixed: bool = False
    device: str = "cpu"

    @property
    def share_of_matrices(self) -> float:
        """Return the share of the parameters that Muon steps."""
        with torch.device("meta"):
            module = build_model(self.sizes, 0)
        matrices = matrices_of(module)
        counts = {name: each.numel() for name, each in module.named_parameters()}
        return sum(counts[name] for name in matrices) / sum(counts.values())

    @property
    def sizes(self) -> ModelConfig:
        """Return the model, with sequences that are short enough for many replicas on a CPU."""
        return replace(preset(self.model), context=MODEL.context) if self.model else MODEL


def inner_of(steps: int) -> InnerConfig:
    """Return the settings of the inner optimizer, which a method's and a rate change."""
    warmup = steps // 20
    return InnerConfig(learning_rate=LEARNING_RATE, warmup_steps=warmup, total_steps=steps, batch_size=BATCH_SIZE)


def trial_of(texts: Mapping[str, Text], seed: int, rate: float, context: int, batch_size: int = BATCH_SIZE) -> Trial:
    """Return a training of replicas that have a text each."""
    keys = [(seed.to_bytes(32, "little"), name.encode()) for name in texts]
    by_key = zip(texts.values(), keys, strict=True)
    return Trial(seed, rate, [Sampler(text, key=key, batch_size=batch_size, context=context) for text, key in by_key])


def run_compare(comparison: MethodComparison, out: Path | None = None) -> list[Result]:
    """Train with every method and seed, with progress and a table on the terminal.

    With the defaults a method takes some ten minutes per seed and core. ``out`` is a JSON file, updated after each
    result; the results that it already has are not repeated. Raises `DataError` if there are fewer kinds of text than
    nodes, if ``out`` is of another comparison, or as `choose_methods` does; `TrainingError` if there is no such device,
    or a method cannot be trained on it; `ManifestError` for an unknown preset.
    """
    chosen = choose_methods(comparison.words, comparison.interval)
    texts = texts_by_kind(comparison.nodes, comparison.text)
    windows = windows_held_out(texts, comparison.sizes.context)
    texts = mixed(texts) if comparison.is_mixed else texts
    console = Console()
    say = partial(console.print, highlight=False, markup=False)
    num_read = comparison.steps * BATCH_SIZE * comparison.sizes.context
    measured = {
        **setting(),
        **{name: getattr(comparison, name) for name in ("nodes", "steps", "seeds", "interval")},
        "rates": ", ".join(f"{rate:g}" for rate in comparison.rates),
        "parameters": num_parameters(comparison.sizes),
        "device": choose_device(comparison.device).description,
        "kinds": [*(["mixed"] if comparison.is_mixed else []), *texts],
        "times that text is read": [round(num_read / len(text.training), 2) for text in texts.values()],
    }
    results = _earlier_results(out, measured) if out is not None else {}

    def keep(_: object, made: Sequence[Result]) -> None:
        results.update({result.key: result for result in made})
        if out is not None:
            document = {"settings": measured, "results": [asdict(each) for each in results.values()]}
            out.parent.mkdir(parents=True, exist_ok=True)
            with replacing(out) as file:
                file.write((json.dumps(document, indent=2) + "\n").encode())

    def play(plays: Iterable[tuple[Method, int]]) -> list[Result]:
        asked = {(method.name, seed, method.rate): (method, seed) for method, seed in plays}
        missing = {key: each for key, each in asked.items() if key not in results}
        if choose_device(comparison.device).torch_device.type == "cpu":
            play_all(
                say,
                [(key, partial(measure, comparison, [each], texts, windows)) for key, each in missing.items()],
                keep,
            )
        else:
            for name, group in groupby(missing, itemgetter(0)):
                say(f"{name}")
                keep(name, measure(comparison, [missing[key] for key in group], texts, windows))
        return [results[key] for key in asked]

    tried = [replaced(method, rate=rate) for method in chosen for rate in comparison.rates]
    chosen = best_of(tried, play((method, TUNING_SEED) for method in tried)) if len(comparison.rates) > 1 else tried
    final = play((method, seed) for method in chosen for seed in range(comparison.seeds))
    console.print(result_grid(final, chosen, comparison).rich())
    return final


def _earlier_results(path: Path, measured: Mapping[str, object]) -> dict[Key, Result]:
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
    return {result.key: result for result in results}


def best_of(tried: Sequence[Method], results: Sequence[Result]) -> list[Method]:
    """Return each method with the rate of its lowest loss, in the order of ``tried``."""
    losses = {(result.method, result.rate): result.loss for result in results}
    best_first = sorted(tried, key=lambda method: losses[method.name, method.rate])
    best = {method.name: method for method in reversed(best_first)}
    return [best[name] for name in dict.fromkeys(method.name for method in tried)]


def documents_by_kind(num_kinds: int, folder: Path | None = None) -> dict[str, list[bytes]]:
    """Return the documents in the largest subfolders of a folder, by default of the standard library, by name.

    Raises `DataError` if there are too few.
    """
    packages: dict[str, list[bytes]] = defaultdict(list)
    for document in documents_in(stdlib_sources() if folder is None else sources_of([folder]), ""):
        package, separator, _ = document.name.partition("/")
        if separator:
            packages[package].append(document.text)
    if num_kinds > len(packages):
        where = "the standard library" if folder is None else folder
        raise DataError(f"{where} has {len(packages)} kinds of text, too few for {num_kinds} nodes")
    largest = sorted(packages, key=lambda name: (-sum(map(len, packages[name])), name))[:num_kinds]
    return {name: packages[name] for name in sorted(largest)}


def texts_by_kind(num_kinds: int, folder: Path | None = None) -> dict[str, Text]:
    """Return these kinds of text in pieces, of which a tenth, by their hashes, is held out; raises as above.

    What is there twice counts once, and is of the first kind that has it.
    """
    texts, known = {}, set[bytes]()
    for name, documents in documents_by_kind(num_kinds, folder).items():
        starts = ((each, start) for each in documents for start in range(0, len(each), PIECE_BYTES))
        pieces = {
            sha256(piece).digest(): piece for each, start in starts if (piece := each[start : start + PIECE_BYTES])
        }
        chosen = set(sorted(pieces.keys() - known)[: KIND_BYTES // PIECE_BYTES])
        known |= pieces.keys()
        training, held_out = (
            b"\0".join(
                piece
                for digest, piece in pieces.items()
                if digest in chosen and (digest[-1] < 256 * HELD_OUT_SHARE) is which
            )
            for which in (False, True)
        )
        found = Found(len(documents), max(training + held_out, default=0), b"")
        texts[name] = Text(np.frombuffer(training, np.uint8), np.frombuffer(held_out, np.uint8), found)
    return texts


def windows_held_out(texts: Mapping[str, Text], context: int) -> list[Batch]:
    """Return `VALIDATION_WINDOWS` windows (B, T + 1) of each kind's held-out text, none of which is training text.

    Raises `DataError` if there are too few.
    """
    length = context + 1
    places, hashes = dict[str, Batch](), dict[str, npt.NDArray[np.uint64]]()
    for name, text in texts.items():
        of_all = _window_hashes(text.held_out[:], length)
        if not len(of_all):
            raise DataError(f"no text of {name} is held out: bring more of it")
        places[name] = draw(len(of_all), 8 * VALIDATION_WINDOWS, b"held out", name.encode())
        hashes[name] = of_all[places[name]]
    drawn = np.unique(np.concatenate(list(hashes.values())))
    is_known = np.zeros(len(drawn), bool)
    for text in texts.values():
        trained = _window_hashes(text.training[:], length)
        nearest = np.searchsorted(drawn, trained).clip(max=len(drawn) - 1)
        is_known[nearest[drawn[nearest] == trained]] = True
    windows: list[Batch] = []
    for name, text in texts.items():
        new = places[name][~is_known[np.searchsorted(drawn, hashes[name])]]
        if len(new) < VALIDATION_WINDOWS:
            raise DataError(f"too little held-out text of {name} is not in the training text too: bring more of it")
        windows.append(cut_out(text.held_out, new[:VALIDATION_WINDOWS], context))
    return windows


def _window_hashes(tokens: Tokens, length: int) -> npt.NDArray[np.uint64]:
    """Return the hash of each window (n - length + 1,)."""
    count = max(len(tokens) - length + 1, 0)
    hashes = np.zeros(count, np.uint64)
    for offset in range(length):
        hashes *= np.uint64(_HASH_FACTOR)
        hashes += tokens[offset : offset + count] + np.uint64(1)
    return hashes


def mixed(texts: Mapping[str, Text]) -> dict[str, Text]:
    """Return texts of which each has the training text of all kinds, and what is held out of its own."""
    training = np.concatenate([text.training[:] for text in texts.values()])
    return {name: Text(training, text.held_out, text.found) for name, text in texts.items()}


def measure(
    comparison: MethodComparison,
    plays: Sequence[tuple[Method, int]],
    texts: Mapping[str, Text],
    windows: Sequence[Batch],
) -> list[Result]:
    """Train with one method, all seeds and rates at once; each result's seconds are its share of the time.

    All are evaluated on ``windows`` (B, T + 1) of each kind. On a CPU it takes one thread.
    """
    device = choose_device(comparison.device).torch_device
    trials = [trial_of(texts, seed, method.rate, comparison.sizes.context) for method, seed in plays]
    method = plays[0][0]
    started = time.perf_counter()
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.set_float32_matmul_precision("high")  # TF32, which is more exact than the bf16 of a node on a GPU
    modules = [build_model(comparison.sizes, trial.seed) for trial in trials]
    stack = Stack(method, modules, inner_of(comparison.steps), trials, device)

    train(method, stack, trials, comparison.steps)
    losses, spreads = stack.losses(windows), stack.spreads()
    seconds = (time.perf_counter() - started) / len(trials)
    merged_losses = stack.losses(windows, merged=True)
    return [
        Result(method.name, trial.seed, trial.rate, loss, merged_loss, spread, seconds)
        for trial, loss, merged_loss, spread in zip(trials, losses, merged_losses, spreads, strict=True)
    ]


def result_grid(results: Sequence[Result], chosen: Sequence[Method], comparison: MethodComparison) -> Grid:
    """Return a table with a row per method: means over seeds, with the standard deviation of the loss.

    Differences from the baseline's losses are of the same seeds, with the 95 % interval of their mean. Bytes are sent
    by a replica for each parameter and inner step; a ring's are what a mean over all takes as an all-reduce.
    """
    by_method: dict[str, dict[int, Result]] = defaultdict(dict)
    for result in results:
        by_method[result.method][result.seed] = result
    base = by_method.get(comparison.baseline, {})
    rows = []
    for method in chosen:
        group, is_base = by_method[method.name], method.name == comparison.baseline
        losses, merged = ([getattr(each, name) for each in group.values()] for name in ("loss", "merged_loss"))
        differences = (
            [getattr(group[seed], name) - getattr(base[seed], name) for seed in group if seed in base]
            for name in ("loss", "merged_loss")
        )
        replicas_less, merged_less = ("" if is_base else interval_of(each) for each in differences)
        rows.append(
            [
                method.name,
                f"{method.rate:g}",
                f"{method.traffic(comparison.share_of_matrices):.3f}",
                f"{method.ring_traffic(comparison.nodes, comparison.share_of_matrices):.3f}",
                str(len(group)),
                f"{statistics.mean(losses):.3f} ± {statistics.stdev(losses) if len(losses) > 1 else 0.0:.3f}",
                replicas_less,
                f"{statistics.mean(merged):.3f}",
                merged_less,
                f"{statistics.mean(result.spread for result in group.values()):.2%}",
            ]
        )
    less = f"less {comparison.baseline}'s"
    header = ["method", "rate", "bytes", "ring", "seeds", "loss", less, "merged", less, "spread"]
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
