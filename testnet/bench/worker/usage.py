"""What a benchmark's processes measure of themselves."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import trio

# Sleep of the watched loop's task.
NAP: Final = 0.001
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@contextlib.contextmanager
def measured() -> Iterator[dict[str, Any]]:
    """Yield a dictionary, and fill it when the block ends.

    ``started_at``, ``ended_at``: `time.monotonic`; ``most_mb``: the peak resident memory during the block above that
    before it (the kernel keeps a maximum, VmHWM, which is reset before).
    """
    figures: dict[str, Any] = {}
    if _CLEAR_REFS.exists():
        _CLEAR_REFS.write_text("5")
    idle_mb = memory_mb("VmRSS")
    figures["started_at"] = time.monotonic()
    yield figures
    figures["ended_at"] = time.monotonic()
    figures["most_mb"] = max(0.0, memory_mb("VmHWM") - idle_mb)


def memory_mb(name: str) -> float:
    """Return a figure of this process's memory (proc(5), ``status``), such as VmRSS, in MB; NaN without /proc."""
    if not _CLEAR_REFS.exists():
        return math.nan
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1_024 / 1e6


@contextlib.asynccontextmanager
async def watched_loop(figures: dict[str, Any]) -> AsyncIterator[None]:
    """Measure the lag of a task that repeatedly sleeps 1 ms, behind its due time: ``lag_ms`` with p50, p99, most."""
    lags: list[float] = []
    has_two = trio.Event()

    async def nap() -> None:
        while True:
            due_at = time.perf_counter() + NAP
            await trio.sleep(NAP)
            lags.append(1e3 * (time.perf_counter() - due_at))
            if len(lags) == 2:
                has_two.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(nap)
        yield
        await has_two.wait()  # the block may be over sooner, and percentiles need two values
        nursery.cancel_scope.cancel()
    hundredths = statistics.quantiles(lags, n=100, method="inclusive")
    figures["lag_ms"] = {"p50": hundredths[49], "p99": hundredths[98], "most_ms": max(lags)}
