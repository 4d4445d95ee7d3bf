"""The benchmark of exchanges: the speed and cost of moving contributions, and the same for other projects.

All figures are between processes on loopback. Variants take turns in the same run, so that other load on the machine
hits all of them alike; figures are medians. A megabyte is 10^6 bytes.

Two peers that average start from the same two random vectors, and what both end with is compared with the mean. Of a
farandole node, the mesh process and its trainer are a process each, as in a daemon.
"""

from __future__ import annotations

import contextlib
import itertools
import ssl
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from cryptography.hazmat.backends.openssl import backend

from farandole.training.outer.codec import encoded_size

from ..report.section import Grid, cell
from .mesh import LATTICA, OURS, MeshCost, measure_mesh, mesh_grid, wait_until_connected
from .process import (
    MB,
    REQUIREMENTS,
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
from .report import CACHE, OUT, Bench, BenchReport, Cache, Claim, Out, Repeats, Write, missing, open_bench

SIZES_MB: Final = (1, 16, 64, 256, 1_024)
VECTOR_MB: Final = 100
LOOP_MB: Final = 1_024
# Size of one swap; a transfer whose event loop is watched is cut into swaps of this size.
PIECE_MB: Final = 256
MESH_REQUESTS: Final = 200
# The share of the raw socket is for payloads of at least this number of megabytes, or for the largest.
LARGE_MB: Final = 256
# A small payload takes a millisecond, so it is moved repeatedly, until this number of megabytes has been moved.
SMALL_MB: Final = 64
MAX_TIMES_AS_OFTEN: Final = 8
PATHS: Final = {
    "raw end": "raw TCP socket, blocking",
    "exchanging node": "our bulk channel (AES-256-GCM records, hashed on arrival)",
}
"""Part of `farandole.testnet.bench.worker` -> name of its path one way."""
CODECS: Final = ("fp32", "int8")
HIVEMIND_CODECS: Final = ("fp32", "8-bit")
COMPARED: Final = (("fp32", "hivemind", "fp32"), ("fp32", LATTICA, "fp32"), ("int8", "hivemind", "8-bit"))
"""Our codec, the other project, and its codec."""
WARM_UPS: Final = 2
# Lattica's connections become fast slowly: its first calls take several times as long as its tenth.
LATTICA_WARM_UPS: Final = 8
# Root mean square error of a mean of two standard normal vectors that still counts as averaged: 8-bit means are off by
# 0.01; an unchanged vector is off by 0.7.
MAX_RMS_ERROR: Final = 0.1


@dataclass(frozen=True, slots=True)
class OneWay:
    """The result of one path and size: medians over the repeats; for memory the maximum."""

    path: str
    size_mb: int
    mb_s: float
    of_raw: float
    """Median of the ratios to the raw socket in the same repeat."""
    peak_mb: float | None
    """Peak memory of the worse end: see `UsageMeter.running`."""


@dataclass(frozen=True, slots=True)
class Averaging:
    """One averaging by two peers, from the first one's start to the last one's end; or medians of several."""

    who: str
    codec: str
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
    def total_s(self) -> float:
        """Return the seconds from two vectors to their mean in both places."""
        return (self.prepare_s or 0.0) + self.exchange_s + (self.finish_s or 0.0)


Average = Callable[[], Averaging]


@dataclass(frozen=True, slots=True)
class LoopLag:
    """The lag of the slower process's event loop, in milliseconds: medians over the repeats; for the maximum the most.

    ``moved_mb`` move each way at once, at ``mb_s``.
    """

    moved_mb: int
    mb_s: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    peak_mb: float | None
    """See `UsageMeter.running`."""


@dataclass(slots=True)
class ExchangeFigures:
    """The measurements until now."""

    vector_mb: int
    one_way: list[OneWay] = field(default_factory=list)
    averagings: list[Averaging] = field(default_factory=list)
    mesh: list[MeshCost] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    loop: LoopLag | None = None

    def report(self, setting: dict[str, Any]) -> BenchReport:
        """Return tables, claims and data, as far as measured."""
        grids = [one_way_grid(self.one_way)] if self.one_way else []
        grids += [pair_grid(self.averagings, self.vector_mb)] if self.averagings else []
        if (lag := self.loop) is not None:
            title = f"Milliseconds that the event loop is late, {lag.moved_mb:,} MB moving both ways"
            row = [f"{lag.mb_s:,.0f}", *(f"{value:.2f}" for value in (lag.p50_ms, lag.p99_ms, lag.max_ms))]
            grids.append(Grid(title, ["MB/s each way", "p50", "p99", "max"], [row]))
        grids += [mesh_grid(self.mesh, self.vector_mb)] if self.mesh else []
        return BenchReport(setting, grids, asdict(self), missing(self.problems), claims=[*self.claims()])

    def claims(self) -> Iterator[Claim]:
        """Yield what is compared with the other projects, and what has a limit."""
        by_name = {(each.who, each.codec): each for each in self.averagings}
        for codec, who, other_codec in COMPARED:
            ours, theirs = by_name.get((OURS, codec)), by_name.get((who, other_codec))
            if ours is not None and theirs is not None:
                words = f"{self.vector_mb} MB of fp32 as {codec}; theirs: {who}, {other_codec}"
                seconds = (f"{ours.exchange_s:.3f}", f"{theirs.exchange_s:.3f}")
                yield Claim(f"seconds in which two peers exchange {words}", *seconds)
                yield Claim(f"seconds from vector to mean, {words}", f"{ours.total_s:.3f}", f"{theirs.total_s:.3f}")
        shares = {each.size_mb: each.of_raw for each in self.one_way if each.path != "raw end"}
        if shares:
            least_mb = min(LARGE_MB, max(shares))
            share = min(share for size, share in shares.items() if size >= least_mb)
            yield Claim(f"least share of a raw socket's rate on the bulk channel, from {least_mb} MB", f"{share:.2f}")
        if self.loop:
            moved = f"{self.loop.moved_mb:,} MB move both ways"
            yield Claim(f"milliseconds that the event loop is late while {moved}, p99", f"{self.loop.p99_ms:.2f}")
        peaks = [each.peak_mb for each in (*self.one_way, *self.averagings, self.loop) if each is not None]
        if (peak := greatest_of(peaks)) is not None:
            yield Claim("most memory of a mesh process over its idle self and the payload, MB", f"{peak:.0f}")
        mesh = {row[0]: row[1:] for row in mesh_grid(self.mesh, self.vector_mb).rows}
        if OURS in mesh:
            header = mesh_grid((), self.vector_mb).header[1:]
            for what, ours_cell, other in zip(header, mesh[OURS], mesh.get(LATTICA, [""] * 3), strict=True):
                yield Claim(f"between two programs: {what}; theirs: Lattica's SDK", ours_cell, other)


def run(
    out: Out = OUT,
    sizes: Annotated[
        list[int] | None, typer.Option(min=1, metavar="MB", help="Megabytes to move one way; may be repeated.")
    ] = None,
    repeats: Repeats = 5,
    peers: Annotated[bool, typer.Option(help="Measure hivemind and Lattica too, installing them once.")] = True,
    cache: Cache = CACHE,
    write: Write = False,
) -> None:
    """Measure how fast contributions move between two processes, and how raw sockets, hivemind and Lattica do.

    Examples: [cyan]farandole testnet bench exchange[/cyan];
    [cyan]farandole testnet bench exchange --sizes 64 --sizes 256 --repeats 3 --no-peers[/cyan]
    """
    others = {name: of[0].partition("==")[2] for name, of in REQUIREMENTS.items()} if peers else {}
    ciphers = {"TLS": ssl.OPENSSL_VERSION, "records": backend.openssl_version_text()}
    with open_bench("exchange", out, write, **ciphers, **others, repeats=repeats) as bench:
        figures = measure(bench, sizes or SIZES_MB, repeats, cache if peers else None)
        bench.publish(figures.report(bench.setting))


def measure(
    bench: Bench,
    sizes_mb: Sequence[int],
    repeats: int,
    cache: Path | None = None,
    vector_mb: int = VECTOR_MB,
    loop_mb: int = LOOP_MB,
    mesh_requests: int = MESH_REQUESTS,
) -> ExchangeFigures:
    """Measure part after part, and write the results after each; other projects only with a ``cache`` folder.

    Raises `BenchError`.
    """
    figures = ExchangeFigures(vector_mb)
    for result in measure_one_way(sorted(set(sizes_mb)), repeats, bench.log, bench.say):
        figures.one_way.append(result)
        bench.write(figures.report(bench.setting))
    figures.averagings, figures.problems = measure_pairs(vector_mb, repeats, bench.log, cache, bench.say)
    bench.write(figures.report(bench.setting))
    figures.loop = measure_loop_lag(loop_mb, repeats, bench.log, bench.say)
    bench.write(figures.report(bench.setting))
    figures.mesh, dropped = measure_mesh(bench.out, vector_mb, mesh_requests, repeats, cache, bench.say)
    figures.problems |= dropped
    return figures


@contextlib.contextmanager
def open_ends(
    part: str, size: int, log: Path, *, are_apart: bool = False
) -> Iterator[tuple[list[BenchWorker], list[list[int]]]]:
    """Open two connected processes that move payloads of up to ``size`` bytes; yield them, and each one's payloads.

    ``are_apart``: on half of the cores each; otherwise they sometimes share a core.
    """
    with contextlib.ExitStack() as stack:
        payloads = [[stack.enter_context(open_payload(size)) for _ in ("outgoing", "incoming")] for _ in range(2)]
        ends = [
            stack.enter_context(
                open_worker(f"{part} {index}", worker_command(part), log, own, side=index if are_apart else None)
            )
            for index, own in enumerate(payloads)
        ]
        connect(*ends)
        yield ends, payloads


# One way


def measure_one_way(sizes_mb: Sequence[int], repeats: int, log: Path, say: Say) -> Iterator[OneWay]:
    """Measure all paths with each size; they take turns in each repeat."""
    largest = max(sizes_mb) * MB
    with contextlib.ExitStack() as stack:
        pairs = {}
        for path in PATHS:
            say(f"one way: starting {path}")
            pairs[path], _ = stack.enter_context(open_ends(path, largest, log, are_apart=True))
            _move(pairs[path], largest)
        for size_mb in sizes_mb:
            often = repeats * max(1, min(MAX_TIMES_AS_OFTEN, SMALL_MB // size_mb))
            moves: dict[str, list[tuple[float, float | None]]] = {path: [] for path in PATHS}
            for index, (path, pair) in itertools.product(range(often), pairs.items()):
                say(f"one way: {size_mb} MB, {index + 1} of {often}, {path}")
                moves[path].append(_move(pair, size_mb * MB))
            for path, own in moves.items():
                yield OneWay(
                    path,
                    size_mb,
                    mb_s=size_mb / statistics.median(seconds for seconds, _ in own),
                    of_raw=statistics.median(
                        raw / seconds for (seconds, _), (raw, _) in zip(own, moves["raw end"], strict=True)
                    ),
                    peak_mb=None if path == "raw end" else greatest_of([peak for _, peak in own]),
                )


def _move(pair: Sequence[BenchWorker], size: int) -> tuple[float, float | None]:
    """Return the seconds of a transfer, and the peak memory of the worse end."""
    receiver, sender = pair
    receiver.put("receive", size=size)
    sender.put("send", size=size)
    sent, received = sender.get(), receiver.get()
    return received["ended_at"] - sent["started_at"], greatest_of([sent["peak_mb"], received["peak_mb"]])


def one_way_grid(results: Sequence[OneWay]) -> Grid:
    """Return the table of each path's rates by size."""
    sizes = sorted({result.size_mb for result in results})
    by_case = {(result.path, result.size_mb): result for result in results}
    rows = []
    for path, name in PATHS.items():
        cells = []
        for size in sizes:
            result = by_case.get((path, size))
            share = f" ({result.of_raw:.2f})" if result and path != "raw end" else ""
            cells.append(f"{result.mb_s:,.0f}{share}" if result else "")
        rows.append([name, *cells])
    return Grid("MB/s one way (share of the raw socket)", ["one way", *(f"{size:,} MB" for size in sizes)], rows)


# Two peers average


def measure_pairs(
    vector_mb: int, repeats: int, log: Path, cache: Path | None, say: Say
) -> tuple[list[Averaging], dict[str, str]]:
    """Measure all pairs in turns, and return what could not be measured; without a cache folder farandole alone."""
    num_elements = vector_mb * MB // 4
    problems: dict[str, str] = {}
    others: dict[str, Average] = {}
    with contextlib.ExitStack() as stack:
        say("averaging: starting farandole")
        ours = stack.enter_context(open_farandole(num_elements, log))
        for name, open_peer in (("hivemind", open_hivemind), (LATTICA, open_lattica)):
            if cache is not None:
                try:
                    python = obtain_python(name.lower(), cache, say)
                    say(f"averaging: starting {name}")
                    others |= stack.enter_context(open_peer(python, num_elements, log))
                except BenchError as error:
                    problems[name] = str(error)
        done, dropped = take_turns(f"averaging {vector_mb} MB", ours | others, others, repeats, WARM_UPS, say)
    medians = [
        replace(
            turns[0],
            prepare_s=median_of([each.prepare_s for each in turns]),
            exchange_s=statistics.median(each.exchange_s for each in turns),
            finish_s=median_of([each.finish_s for each in turns]),
            rms_error=max(each.rms_error for each in turns),
            peak_mb=greatest_of([each.peak_mb for each in turns]),
        )
        for turns in done.values()
        if turns
    ]
    return medians, problems | dropped


@contextlib.contextmanager
def open_farandole(num_elements: int, log: Path) -> Iterator[dict[str, Average]]:
    """Open two nodes of two processes each: the trainer encodes and averages, the mesh process exchanges."""
    with contextlib.ExitStack() as stack:
        size = encoded_size("fp32", num_elements)
        nodes, payloads = stack.enter_context(open_ends("exchanging node", size, log))
        command = worker_command("averaging trainer")
        trainers = [stack.enter_context(open_worker("averaging trainer", command, log, own)) for own in payloads]
        ask_all(trainers, "begin", [{"index": index} for index in range(2)], num_elements=num_elements)
        rounds = itertools.count(1)

        def average(codec: str) -> Averaging:
            prepared = ask_all(trainers, "contribute", codec=codec)
            contributions = [{name: each[name] for name in ("size", "digest")} for each in prepared]
            exchanged = ask_all(nodes, "exchange", contributions, round=next(rounds), codec=codec)
            finished = ask_all(trainers, "average", codec=codec)
            averaging = Averaging(
                OURS,
                codec,
                payload_mb=prepared[0]["size"] / MB,
                prepare_s=elapsed(prepared),
                exchange_s=elapsed(exchanged),
                finish_s=elapsed(finished),
                rms_error=_error(finished),
                peak_mb=greatest_of([answer["peak_mb"] for answer in exchanged]),
            )
            if averaging.rms_error > MAX_RMS_ERROR:
                raise BenchError(f"{OURS}, {codec}: not the mean, but off by {averaging.rms_error:g}")
            return averaging

        yield {f"{OURS}, {codec}": partial(average, codec) for codec in CODECS}


@contextlib.contextmanager
def open_hivemind(python: Path, num_elements: int, log: Path) -> Iterator[dict[str, Average]]:
    """Open two `DecentralizedAverager`; the measured part is the all-reduce, once both have found each other."""
    with open_peers("hivemind", python, num_elements, log) as pair:

        def average(codec: str) -> Averaging:
            ask_all(pair, "find", codec=codec)
            exchange_s = elapsed(ask_all(pair, "average"))
            error = _error(ask_all(pair, "check", codec=codec))
            return Averaging("hivemind", codec, exchange_s=exchange_s, rms_error=error)

        yield {f"hivemind, {codec}": partial(average, codec) for codec in HIVEMIND_CODECS}


@contextlib.contextmanager
def open_lattica(python: Path, num_elements: int, log: Path) -> Iterator[dict[str, Average]]:
    """Open two peers that call each other with their vectors, and average with numpy."""
    with open_peers("lattica", python, num_elements, log) as pair:
        wait_until_connected(LATTICA, pair)

        def average() -> Averaging:
            ask_all(pair, "empty")
            swapped, averaged = ask_all(pair, "swap"), ask_all(pair, "average")
            size, error = 4 * num_elements / MB, _error(averaged)
            return Averaging(LATTICA, "fp32", size, None, elapsed(swapped), elapsed(averaged), rms_error=error)

        for _ in range(LATTICA_WARM_UPS):
            average()
        yield {f"{LATTICA}, fp32": average}


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


def _error(answers: Sequence[dict[str, Any]]) -> float:
    return max(float(answer["rms_error"]) for answer in answers)


def pair_grid(results: Sequence[Averaging], vector_mb: int) -> Grid:
    """Return the table of averaging times by project."""
    rows = [
        [
            f"{result.who}, {result.codec}",
            cell(result.payload_mb, "{:.1f}"),
            *(cell(s, "{:.3f}") for s in (result.prepare_s, result.exchange_s, result.finish_s, result.total_s)),
            f"{result.rms_error:.1g}" + ("" if result.rms_error <= MAX_RMS_ERROR else ": not averaged"),
        ]
        for result in results
    ]
    header = ["two peers average", "MB each way", "encode, hash", "exchange", "decode, mean", "in all", "RMS error"]
    return Grid(f"Seconds in which two peers average {vector_mb} MB of fp32", header, rows)


# The event loop


def measure_loop_lag(moved_mb: int, repeats: int, log: Path, say: Say) -> LoopLag:
    """Measure two nodes' event loops while ``moved_mb`` moves each way over an open bulk channel."""
    piece_mb = min(PIECE_MB, moved_mb)
    times = -(-moved_mb // piece_mb)
    swaps: list[list[dict[str, Any]]] = []
    with open_ends("exchanging node", piece_mb * MB, log) as (nodes, _):
        for index in range(-1, repeats):
            say(f"event loop: {'warm-up' if index < 0 else f'{index + 1} of {repeats}'}")
            swaps.append(ask_all(nodes, "swap", size=piece_mb * MB, times=times))
    del swaps[0]
    p50, p99 = (
        statistics.median(max(each["lag_ms"][name] for each in swap) for swap in swaps) for name in ("p50", "p99")
    )
    return LoopLag(
        moved_mb=piece_mb * times,
        mb_s=piece_mb * times / statistics.median(map(elapsed, swaps)),
        p50_ms=p50,
        p99_ms=p99,
        max_ms=max(each["lag_ms"]["max"] for swap in swaps for each in swap),
        peak_mb=greatest_of([each["peak_mb"] for swap in swaps for each in swap]),
    )
