"""Two peers average a vector: farandole's nodes, hivemind's averagers, and peers that Lattica connects.

Each starts from the same two random vectors, and the resulting vectors of both peers are compared with their mean.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from farandole.training.outer.codec import encoded_size

from ..report.section import Grid, cell
from .mesh import wait_until_connected
from .process import (
    MB,
    BenchError,
    BenchWorker,
    Say,
    ask_all,
    connect,
    elapsed,
    greatest_of,
    median_of,
    obtain_python,
    open_payload,
    open_worker,
    peer_command,
    take_turns,
    worker_command,
)

WARM_UPS: Final = 2
# Lattica's connections become fast slowly: its first calls take several times as long as its tenth.
LATTICA_WARM_UPS: Final = 8
# Root mean square error of a mean of two standard normal vectors that still counts as averaged: 8-bit means are off by
# 0.01; an unchanged vector is off by 0.7.
MAX_RMS_ERROR: Final = 0.1

# (codec, way): see `farandole.testnet.bench.worker.exchange`. The trainer encodes before an exchange, and decodes and
# averages after it.
WAYS: Final = (
    ("fp32", "new channel"),
    ("fp32", "kept channel"),
    ("fp32", "stream"),
    ("bf16", "new channel"),
    ("int8", "new channel"),
)
HIVEMIND_CODECS: Final = ("fp32", "fp16", "8-bit")


@dataclass(frozen=True, slots=True)
class Averaging:
    """One averaging by two peers, from the first one's start to the last one's end; or medians of several."""

    who: str
    how: str
    payload_mb: float | None = None
    """Size of one peer's message to the other; None where it is not known."""
    prepare_s: float | None = None
    """Freezing, encoding and hashing; None where it is part of the exchange."""
    exchange_s: float = 0.0
    finish_s: float | None = None
    """Decoding and averaging; None where it is part of the exchange."""
    rms_error: float = 0.0
    peak_mb: float | None = None
    """Peak memory of the mesh process: see `UsageMeter.running`."""

    @property
    def name(self) -> str:
        """Return the name for tables."""
        return f"{self.who}, {self.how}"

    @property
    def total_s(self) -> float:
        """Return the seconds from two vectors to their mean in both places."""
        return (self.prepare_s or 0.0) + self.exchange_s + (self.finish_s or 0.0)

    @property
    def has_averaged(self) -> bool:
        """Return whether both peers had the mean."""
        return self.rms_error <= MAX_RMS_ERROR


Average = Callable[[], Averaging]


def measure_pairs(
    vector_mb: int,
    repeats: int,
    log: Path,
    cache: Path | None,
    say: Say,
    ways: Sequence[tuple[str, str]] = WAYS,
) -> tuple[list[Averaging], dict[str, str]]:
    """Measure all ways in turns, and return what could not be measured; without a cache folder farandole alone."""
    num_elements = vector_mb * MB // 4
    problems: dict[str, str] = {}
    others: dict[str, Average] = {}
    with contextlib.ExitStack() as stack:
        say("averaging: starting farandole")
        ours = stack.enter_context(open_farandole(num_elements, log, ways))
        for name, open_peer in (("hivemind", open_hivemind), ("Lattica", open_lattica)):
            if cache is not None:
                try:
                    python = obtain_python(name.lower(), cache, say)
                    say(f"averaging: starting {name}")
                    others |= stack.enter_context(open_peer(python, num_elements, log))
                except BenchError as error:
                    problems[name] = str(error)
        done, dropped = take_turns(f"averaging {vector_mb} MB", ours | others, others, repeats, WARM_UPS, say)
    return [_median(averagings) for averagings in done.values() if averagings], problems | dropped


def _median(averagings: list[Averaging]) -> Averaging:
    return replace(
        averagings[0],
        prepare_s=median_of([each.prepare_s for each in averagings]),
        exchange_s=statistics.median(each.exchange_s for each in averagings),
        finish_s=median_of([each.finish_s for each in averagings]),
        rms_error=max(each.rms_error for each in averagings),
        peak_mb=greatest_of([each.peak_mb for each in averagings]),
    )


@contextlib.contextmanager
def open_farandole(num_elements: int, log: Path, ways: Sequence[tuple[str, str]]) -> Iterator[dict[str, Average]]:
    """Open two nodes of two processes each, as in a daemon: the trainer encodes, the mesh process exchanges."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(_open_node(index, encoded_size("fp32", num_elements), log)) for index in range(2)]
        nodes, trainers = zip(*opened, strict=True)
        connect(*nodes)
        ask_all(trainers, "begin", [{"index": index} for index in range(2)], num_elements=num_elements)
        pair = FarandolePair(nodes, trainers)
        yield {f"farandole, {codec}, {way}": partial(pair.average, codec, way) for codec, way in ways}


@contextlib.contextmanager
def _open_node(index: int, size: int, log: Path) -> Iterator[tuple[BenchWorker, BenchWorker]]:
    """Open a mesh process and its trainer, which share memory for contributions of ``size`` bytes."""
    with contextlib.ExitStack() as stack:
        payloads = [stack.enter_context(open_payload(name, size)) for name in ("outgoing", "incoming")]
        descriptors = [payload.descriptor for payload in payloads]
        node, trainer = (
            stack.enter_context(open_worker(f"{part} {index}", worker_command(part), log, descriptors))
            for part in ("exchanging node", "averaging trainer")
        )
        yield node, trainer


class FarandolePair:
    """Two nodes with their trainers."""

    def __init__(self, nodes: Sequence[BenchWorker], trainers: Sequence[BenchWorker]) -> None:
        self._nodes = nodes
        self._trainers = trainers
        self._rounds = itertools.count(1)

    def average(self, codec: str, way: str) -> Averaging:
        """Encode, then exchange, then decode and average."""
        prepared = ask_all(self._trainers, "contribute", codec=codec)
        contributions = [{name: each[name] for name in ("size", "digest")} for each in prepared]
        exchanged = ask_all(self._nodes, "exchange", contributions, round=next(self._rounds), codec=codec, way=way)
        finished = ask_all(self._trainers, "average", codec=codec)
        averaging = Averaging(
            "farandole",
            f"{codec}, {way}",
            payload_mb=prepared[0]["size"] / MB,
            prepare_s=elapsed(prepared),
            exchange_s=elapsed(exchanged),
            finish_s=elapsed(finished),
            rms_error=_error(finished),
            peak_mb=greatest_of([answer["peak_mb"] for answer in exchanged]),
        )
        if not averaging.has_averaged:
            raise BenchError(f"{averaging.name}: not the mean, but off by {averaging.rms_error:g}")
        return averaging


def _error(answers: Sequence[dict[str, Any]]) -> float:
    return max(float(answer["rms_error"]) for answer in answers)


@contextlib.contextmanager
def open_hivemind(python: Path, num_elements: int, log: Path) -> Iterator[dict[str, Average]]:
    """Open two `DecentralizedAverager`; the measured part is the all-reduce, once both have found each other."""
    with open_peers("hivemind", python, num_elements, log) as pair:

        def average(codec: str) -> Averaging:
            ask_all(pair, "find", codec=codec)
            exchange_s = elapsed(ask_all(pair, "average"))
            return Averaging(
                "hivemind", codec, exchange_s=exchange_s, rms_error=_error(ask_all(pair, "check", codec=codec))
            )

        yield {f"hivemind, {codec}": partial(average, codec) for codec in HIVEMIND_CODECS}


@contextlib.contextmanager
def open_lattica(python: Path, num_elements: int, log: Path) -> Iterator[dict[str, Average]]:
    """Open two peers that call each other with their vectors, and average with numpy."""
    with open_peers("lattica", python, num_elements, log) as pair:
        wait_until_connected("Lattica", pair)

        def average() -> Averaging:
            ask_all(pair, "empty")
            swapped = ask_all(pair, "swap")
            averaged = ask_all(pair, "average")
            size, error = 4 * num_elements / MB, _error(averaged)
            exchange_s, finish_s = elapsed(swapped), elapsed(averaged)
            return Averaging("Lattica", "fp32", size, None, exchange_s, finish_s, rms_error=error)

        for _ in range(LATTICA_WARM_UPS):
            average()
        yield {"Lattica, fp32": average}


@contextlib.contextmanager
def open_peers(name: str, python: Path, num_elements: int, log: Path) -> Iterator[list[BenchWorker]]:
    """Open two peers of another project, of which the second knows the first."""
    command = peer_command(python, name)
    with (
        open_worker(f"{name} 0", command, log) as first,
        open_worker(f"{name} 1", command, log) as second,
    ):
        addresses = first.ask("open", index=0, num_elements=num_elements, peers=[])["addresses"]
        second.ask("open", index=1, num_elements=num_elements, peers=addresses)
        yield [first, second]


def pair_grid(results: Sequence[Averaging], vector_mb: int) -> Grid:
    """Return the table of averaging times by project."""
    rows = [
        [
            result.name,
            cell(result.payload_mb, "{:.1f}"),
            *(cell(s, "{:.3f}") for s in (result.prepare_s, result.exchange_s, result.finish_s, result.total_s)),
            f"{result.rms_error:.1g}" + ("" if result.has_averaged else ": not averaged"),
        ]
        for result in results
    ]
    header = ["two peers average", "MB each way", "encode, hash", "exchange", "decode, mean", "in all", "RMS error"]
    return Grid(f"Seconds in which two peers average {vector_mb} MB of fp32", header, rows)
