"""The event loop's lag in a mesh process while its threads move contributions both ways."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from farandole.node.base.control import call

from ..report.section import Grid
from .process import MB, BenchWorker, Say, connect, elapsed, greatest_of, open_payload, open_worker, worker_command
from .worker.server import percentiles

# Interval of status requests: short enough for a 99th percentile, long enough not to be a load.
STATUS_INTERVAL: Final = 0.02
# Size of one swap; a transfer is cut into swaps of this size.
PIECE_MB: Final = 256


@dataclass(frozen=True, slots=True)
class LoopLag:
    """The lag of the slower process, in milliseconds: medians over the repeats; for ``max`` the maximum."""

    moved_mb: int
    """Size in each direction."""
    mb_s: float
    """Rate in each direction, both at once."""
    p50_ms: float
    p99_ms: float
    max_ms: float
    idle_p50_ms: float
    idle_p99_ms: float
    idle_max_ms: float
    status_p50_ms: float
    status_p99_ms: float
    status_max_ms: float
    """Times of the control socket's answers during the transfers, over all repeats."""
    peak_mb: float | None
    """See `UsageMeter.running`."""


def measure_loop_lag(moved_mb: int, repeats: int, log: Path, say: Say) -> LoopLag:
    """Measure two nodes' loops at rest, and while ``moved_mb`` moves each way over an open bulk channel."""
    piece_mb = min(PIECE_MB, moved_mb)
    times = -(-moved_mb // piece_mb)
    rests: list[dict[str, Any]] = []
    swaps: list[dict[str, Any]] = []
    seconds: list[float] = []
    answers: list[float] = []
    with contextlib.ExitStack() as stack:
        say("event loop: starting two nodes")
        home = stack.enter_context(tempfile.TemporaryDirectory())
        nodes = []
        for index in range(2):
            memories = [stack.enter_context(open_payload(name, piece_mb * MB)) for name in ("outgoing", "incoming")]
            memories[0].fill()
            descriptors = [memory.descriptor for memory in memories]
            node = open_worker(f"node {index}", worker_command("exchanging node"), log, descriptors)
            nodes.append(stack.enter_context(node))
        connect(*nodes)
        nodes[0].ask("control", home=home)
        for index in range(-1, repeats):
            say(f"event loop: {'warm-up' if index < 0 else f'{index + 1} of {repeats}'}")
            swapped, waits = _ask_watching(nodes, home, "swap", size=piece_mb * MB, times=times)
            rested, _ = _ask_watching(nodes, home, "rest", seconds=elapsed(swapped))
            if index >= 0:
                swaps += swapped
                rests += rested
                seconds.append(elapsed(swapped))
                answers += waits
    status = {f"status_{name}_ms": value for name, value in percentiles(answers).items()}
    return LoopLag(
        moved_mb=piece_mb * times,
        mb_s=piece_mb * times / statistics.median(seconds),
        peak_mb=greatest_of([figures["peak_mb"] for figures in swaps]),
        **_worst(swaps, ""),
        **_worst(rests, "idle_"),
        **status,
    )


def _ask_watching(
    nodes: Sequence[BenchWorker], home: str, do: str, **request: Any
) -> tuple[list[dict[str, Any]], list[float]]:
    """Return both nodes' answers, and the duration of each status request until then, in ms (at least two)."""
    waits: list[float] = []
    for node in nodes:
        node.put(do, **request)
    while len(waits) < 2 or not nodes[0].has_answered(STATUS_INTERVAL):
        started_at = time.perf_counter()
        call(Path(home), "status")
        waits.append(1e3 * (time.perf_counter() - started_at))
    return [node.get() for node in nodes], waits


def _worst(figures: list[dict[str, Any]], prefix: str) -> dict[str, float]:
    """Return lags by the names of `LoopLag`: medians over repeats of the slower node; for the maximum the greatest."""
    lags = [each["lag_ms"] for each in figures]
    pairs = list(zip(lags[::2], lags[1::2], strict=True))
    medians = {name: statistics.median(max(one[name], other[name]) for one, other in pairs) for name in ("p50", "p99")}
    worst = {**medians, "max": max(each["max"] for each in lags)}
    return {f"{prefix}{name}_ms": value for name, value in worst.items()}


def loop_grid(lag: LoopLag) -> Grid:
    """Return the table of the event loop's lag."""
    by_case = {
        "at rest": (lag.idle_p50_ms, lag.idle_p99_ms, lag.idle_max_ms),
        "moving": (lag.p50_ms, lag.p99_ms, lag.max_ms),
        "moving: a request on the control socket": (lag.status_p50_ms, lag.status_p99_ms, lag.status_max_ms),
    }
    rows = [[case, *(f"{value:.2f}" for value in values)] for case, values in by_case.items()]
    title = (
        f"Milliseconds that the event loop is late, {lag.moved_mb:,} MB moving both ways at {lag.mb_s:,.0f} MB/s each"
    )
    return Grid(title, ["event loop", "p50", "p99", "max"], rows)
