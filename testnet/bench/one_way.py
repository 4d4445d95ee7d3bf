"""The speed and cost of moving payloads from one process to another, by path."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..report.section import Grid, cell
from .process import (
    MB,
    BenchError,
    BenchWorker,
    Say,
    SharedPayload,
    connect,
    greatest_of,
    open_payload,
    open_worker,
    worker_command,
)
from .worker.paths import PATHS

# A small payload takes a millisecond, so it is moved repeatedly, until this number of megabytes has been moved.
SMALL_MB: Final = 64
MAX_TIMES_AS_OFTEN: Final = 8
PATH_NAMES: Final = {
    "raw": "raw TCP socket, blocking",
    "stock": "py-libp2p stream as it comes (Noise, its yamux)",
    "libp2p": "our libp2p stream (Noise, our yamux)",
    "bulk": "our bulk channel (AES-256-GCM records, hashed on arrival)",
}


@dataclass(frozen=True, slots=True)
class OneWay:
    """The result of one path and size: medians over the repeats; for memory the maximum."""

    path: str
    size_mb: int
    mb_s: float
    of_raw: float
    """Median of the ratios to the raw socket in the same repeat."""
    sender_cpu_s_per_gb: float
    receiver_cpu_s_per_gb: float
    sender_peak_mb: float | None
    receiver_peak_mb: float | None
    """See `UsageMeter.running`."""
    seconds: list[float]
    """Seconds of each repeat."""


@dataclass(frozen=True, slots=True)
class _Move:
    seconds: float
    sender: dict[str, Any]
    receiver: dict[str, Any]


def measure_one_way(
    sizes_mb: Sequence[int], repeats: int, log: Path, say: Say, paths: Sequence[str] = tuple(PATHS)
) -> Iterator[OneWay]:
    """Measure these paths, one of which is "raw", with each size; they take turns in each repeat."""
    largest = max(sizes_mb) * MB
    with contextlib.ExitStack() as stack:
        outgoing = stack.enter_context(open_payload("outgoing", largest))
        incoming = stack.enter_context(open_payload("incoming", largest))
        outgoing.fill()
        pairs = {}
        for path in paths:
            say(f"one way: starting {path}")
            pairs[path] = stack.enter_context(_open_pair(path, log, [outgoing, incoming]))
            say(f"one way: warming {path} up")
            _move(path, pairs[path], outgoing, incoming, largest)
        for size_mb in sizes_mb:
            often = repeats * max(1, min(MAX_TIMES_AS_OFTEN, SMALL_MB // size_mb))
            moves: dict[str, list[_Move]] = {path: [] for path in paths}
            for index in range(often):
                for path, pair in pairs.items():
                    say(f"one way: {size_mb} MB, {index + 1} of {often}, {path}")
                    moves[path].append(_move(path, pair, outgoing, incoming, size_mb * MB))
            for path in paths:
                yield _summary(path, size_mb, moves[path], moves["raw"])


@contextlib.contextmanager
def _open_pair(path: str, log: Path, payloads: Sequence[SharedPayload]) -> Iterator[tuple[BenchWorker, BenchWorker]]:
    """Open a connected sender and receiver, on half of the cores each: otherwise they sometimes share a core."""
    command, descriptors = worker_command("mover"), [payload.descriptor for payload in payloads]
    with (
        open_worker(f"{path} receiver", command, log, descriptors, side=0) as receiver,
        open_worker(f"{path} sender", command, log, descriptors, side=1) as sender,
    ):
        connect(receiver, sender, path=path)
        yield sender, receiver


def _move(
    path: str, pair: tuple[BenchWorker, BenchWorker], outgoing: SharedPayload, incoming: SharedPayload, size: int
) -> _Move:
    sender, receiver = pair
    incoming.spoil(size)
    receiver.put("receive", size=size)
    sender.put("send", size=size)
    sent, received = sender.get(), receiver.get()
    if not incoming.equals(outgoing, size):
        raise BenchError(f"{path}: what arrived is not what was sent")
    return _Move(received["ended_at"] - sent["started_at"], sent, received)


def _summary(path: str, size_mb: int, moves: list[_Move], raw: list[_Move]) -> OneWay:
    gigabytes = size_mb / 1_000
    return OneWay(
        path=path,
        size_mb=size_mb,
        mb_s=size_mb / statistics.median(move.seconds for move in moves),
        of_raw=statistics.median(base.seconds / move.seconds for move, base in zip(moves, raw, strict=True)),
        sender_cpu_s_per_gb=statistics.median(move.sender["cpu_seconds"] for move in moves) / gigabytes,
        receiver_cpu_s_per_gb=statistics.median(move.receiver["cpu_seconds"] for move in moves) / gigabytes,
        sender_peak_mb=greatest_of([move.sender["peak_mb"] for move in moves]),
        receiver_peak_mb=greatest_of([move.receiver["peak_mb"] for move in moves]),
        seconds=[move.seconds for move in moves],
    )


def one_way_grid(results: Sequence[OneWay]) -> Grid:
    """Return the table of each path's rates by size."""
    sizes = sorted({result.size_mb for result in results})
    rows = []
    for path, name in PATH_NAMES.items():
        by_size = {result.size_mb: result for result in results if result.path == path}
        cells = [_rate(by_size[size]) if size in by_size else "" for size in sizes]
        rows.append([name, *cells])
    return Grid("MB/s one way (share of the raw socket)", ["one way", *(f"{size:,} MB" for size in sizes)], rows)


def cost_grid(results: Sequence[OneWay]) -> Grid:
    """Return the table of each path's cost with the largest size."""
    largest = max(result.size_mb for result in results)
    rows = [[PATH_NAMES[result.path], *_costs(result)] for result in results if result.size_mb == largest]
    header = ["sender / receiver", "CPU s a GB", "peak memory over idle"]
    return Grid(f"What it costs to move {largest:,} MB one way", header, rows)


def _rate(result: OneWay) -> str:
    return f"{result.mb_s:,.0f}" + ("" if result.path == "raw" else f" ({result.of_raw:.2f})")


def _costs(result: OneWay) -> list[str]:
    return [
        f"{result.sender_cpu_s_per_gb:.2f} / {result.receiver_cpu_s_per_gb:.2f}",
        " / ".join(cell(peak, "{:.0f}", "?") for peak in (result.sender_peak_mb, result.receiver_peak_mb)) + " MB",
    ]
