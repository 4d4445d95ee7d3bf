"""How fast contributions move, what that costs, and how others do: the benchmark of exchanges.

Everything is measured between processes on loopback, variants taking turns in the same run, so that what else the
machine does hits all of them alike; figures are medians. A megabyte is 10^6 bytes.
"""

from __future__ import annotations

import json
import os
import platform
import ssl
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from .environments import REQUIREMENTS
from .loop import LoopLag, measure_loop_lag
from .one_way import OneWay, measure_one_way
from .pair import WAYS, Averaging, measure_pairs
from .paths import PATHS
from .process import greatest_of
from .tables import Grid, cost_grid, loop_grid, one_way_grid, pair_grid

SIZES_MB: Final = (1, 16, 64, 256, 1_024)
VECTOR_MB: Final = 100
LOOP_MB: Final = 1_024
# The share of the raw socket is of payloads of at least so many megabytes, or of the largest.
LARGE_MB: Final = 256


@dataclass(slots=True)
class Report:
    """What was measured so far."""

    setting: dict[str, Any]
    vector_mb: int
    one_way: list[OneWay] = field(default_factory=list)
    averagings: list[Averaging] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    loop: LoopLag | None = None

    def headlines(self) -> dict[str, float | None]:
        """The few figures that there are targets for."""
        ours = self._averaging("farandole", "fp32, new channel")
        hivemind = self._averaging("hivemind", "fp32")
        lattica = self._averaging("Lattica", "fp32")
        return {
            "bulk_over_raw": self._bulk_over_raw(),
            "pair_100mb_s": ours.exchange_s if ours else None,
            "pair_100mb_in_all_s": ours.total_s if ours else None,
            "pair_100mb_s_hivemind": hivemind.exchange_s if hivemind else None,
            "pair_100mb_s_lattica": lattica.exchange_s if lattica else None,
            "peak_mb_over_payload": self._peak_mb(),
            "loop_lag_p99_ms": self.loop.p99_ms if self.loop else None,
        }

    def document(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            **self.headlines(),
            "setting": self.setting,
            "one_way": [asdict(result) for result in self.one_way],
            "pair": [
                {**asdict(each), "total_s": each.total_s, "has_averaged": each.has_averaged} for each in self.averagings
            ],
            "loop": asdict(self.loop) if self.loop else None,
            "problems": self.problems,
        }

    def grids(self) -> list[Grid]:
        """Everything, for people."""
        grids = [one_way_grid(self.one_way), cost_grid(self.one_way)] if self.one_way else []
        if self.averagings:
            grids.append(pair_grid(self.averagings, self.vector_mb))
        if self.loop:
            grids.append(loop_grid(self.loop))
        return grids

    def markdown(self) -> str:
        """Tables to paste into a document."""
        words = ", ".join(f"{name} {value}" for name, value in self.setting.items())
        figures = "; ".join(f"{name} {'unknown' if v is None else f'{v:.3g}'}" for name, v in self.headlines().items())
        problems = [f"{name}: {reason}" for name, reason in self.problems.items()]
        tables = [grid.markdown() for grid in self.grids()]
        return "\n\n".join([f"Setting: {words}.", *tables, f"{figures}.", *problems]) + "\n"

    def _averaging(self, who: str, how: str) -> Averaging | None:
        return next((each for each in self.averagings if (each.who, each.how) == (who, how)), None)

    def _bulk_over_raw(self) -> float | None:
        """The least share over all large sizes."""
        shares = {result.size_mb: result.of_raw for result in self.one_way if result.path == "bulk"}
        large = [share for size, share in shares.items() if size >= min(LARGE_MB, max(shares))]
        return min(large, default=None)

    def _peak_mb(self) -> float | None:
        """The greatest over everything that a mesh process did, exchanges over the stream included."""
        one_way = [peak for r in self.one_way if r.path == "bulk" for peak in (r.sender_peak_mb, r.receiver_peak_mb)]
        pairs = [each.peak_mb for each in self.averagings if each.who == "farandole"]
        return greatest_of([*one_way, *pairs, self.loop.peak_mb if self.loop else None])


def run_bench(
    out: Path,
    sizes_mb: Sequence[int] = SIZES_MB,
    repeats: int = 5,
    cache: Path | None = None,
    vector_mb: int = VECTOR_MB,
    loop_mb: int = LOOP_MB,
    paths: Sequence[str] = tuple(PATHS),
    ways: Sequence[tuple[str, str]] = WAYS,
) -> Report:
    """Measure, with progress and tables on the terminal; ``out`` gets exchange.json and exchange.md as it goes.

    Without a cache folder, in which they are installed, the other projects are left out. Raises `BenchError`.
    """
    out.mkdir(parents=True, exist_ok=True)
    log = out / "exchange.log"
    log.unlink(missing_ok=True)
    console = Console()
    report = Report({**_setting(), "repeats": repeats}, vector_mb)

    def note(*grids: Grid) -> None:
        (out / "exchange.json").write_text(json.dumps(report.document(), indent=2) + "\n")
        (out / "exchange.md").write_text(report.markdown())
        for grid in grids:
            console.print(grid.rich())

    with console.status("starting") as status:

        def say(text: str) -> None:
            status.update(text)

        for result in measure_one_way(sorted(set(sizes_mb)), repeats, log, say, paths):
            report.one_way.append(result)
            if not console.is_terminal:
                console.print(f"one way: {result.path}, {result.size_mb} MB: {result.mb_s:,.0f} MB/s")
        note(one_way_grid(report.one_way), cost_grid(report.one_way))
        pairs = measure_pairs(vector_mb, repeats, log, cache, say, ways)
        report.averagings, report.problems = pairs.results, pairs.problems
        note(pair_grid(report.averagings, vector_mb))
        report.loop = measure_loop_lag(loop_mb, repeats, log, say)
        note(loop_grid(report.loop))
    for name, value in report.headlines().items():
        console.print(f"{name}: {'unknown' if value is None else f'{value:.3g}'}", highlight=False)
    for name, reason in report.problems.items():
        console.print(f"{name} is missing: {reason}", style="red", markup=False)
    console.print(f"{out / 'exchange.json'}, {out / 'exchange.md'}", markup=False, highlight=False)
    return report


def _setting() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "load before": round(os.getloadavg()[0], 1),
        "system": platform.platform(terse=True),
        "Python": platform.python_version(),
        "TLS": ssl.OPENSSL_VERSION,
        **{name: requirements[0] for name, requirements in REQUIREMENTS.items()},
    }
