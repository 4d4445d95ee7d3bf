"""The tables of the benchmark of exchanges."""

from __future__ import annotations

from collections.abc import Sequence

from ..report.section import Grid, cell
from .loop import LoopLag
from .one_way import OneWay
from .pair import Averaging

PATH_NAMES = {
    "raw": "raw TCP socket, blocking",
    "tls": "one TLS socket in trio",
    "stock": "py-libp2p stream as it comes (Noise, its yamux)",
    "libp2p": "our libp2p stream (Noise, our yamux)",
    "bulk": "our bulk channel (AES-256-GCM records, hashed on arrival)",
}


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


def pair_grid(results: Sequence[Averaging], vector_mb: int) -> Grid:
    """Return the table of averaging times by project."""
    rows = [
        [
            f"{result.who}, {result.how}",
            cell(result.payload_mb, "{:.1f}"),
            *(cell(s, "{:.3f}") for s in (result.prepare_s, result.exchange_s, result.finish_s, result.total_s)),
            f"{result.rms_error:.1g}" + ("" if result.has_averaged else ": not averaged"),
        ]
        for result in results
    ]
    header = ["two peers average", "MB each way", "encode, hash", "exchange", "decode, mean", "in all", "RMS error"]
    return Grid(f"Seconds in which two peers average {vector_mb} MB of fp32", header, rows)


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
