"""The benchmark of exchanges: the speed and cost of moving contributions, and the same for other projects.

All figures are between processes on loopback. Variants take turns in the same run, so that other load on the machine
hits all of them alike; figures are medians. A megabyte is 10^6 bytes.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from cryptography.hazmat.backends.openssl import backend

from ..report.section import Grid
from .environments import REQUIREMENTS
from .loop import LoopLag, measure_loop_lag
from .one_way import OneWay, measure_one_way
from .pair import AS_A_ROUND, ROUNDS, UNGUARDED, WAYS, Averaging, measure_pairs
from .paths import PATHS
from .process import greatest_of
from .report import CACHE, OUT, Bench, BenchReport, Cache, Out, Repeats, Write, missing, open_bench
from .tables import cost_grid, loop_grid, one_way_grid, pair_grid

SIZES_MB: Final = (1, 16, 64, 256, 1_024)
VECTOR_MB: Final = 100
LOOP_MB: Final = 1_024
# The share of the raw socket is for payloads of at least this number of megabytes, or for the largest.
LARGE_MB: Final = 256


@dataclass(slots=True)
class ExchangeFigures:
    """The measurements until now."""

    vector_mb: int
    one_way: list[OneWay] = field(default_factory=list)
    averagings: list[Averaging] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    loop: LoopLag | None = None

    def headlines(self) -> dict[str, float | None]:
        """Return the figures that have targets."""
        ours = self._averaging("farandole", "fp32, new channel")
        as_a_round = self._averaging("farandole", f"fp32, new channel{AS_A_ROUND}")
        unguarded = self._averaging("farandole", f"fp32, new channel{UNGUARDED}{AS_A_ROUND}")
        hivemind = self._averaging("hivemind", "fp32")
        lattica = self._averaging("Lattica", "fp32")
        return {
            "bulk_over_raw": self._bulk_over_raw(),
            "pair_100mb_s": ours.exchange_s if ours else None,
            "pair_100mb_in_all_s": as_a_round.total_s if as_a_round else None,
            "guard_over_none": as_a_round.total_s / unguarded.total_s if as_a_round and unguarded else None,
            "pair_100mb_s_hivemind": hivemind.exchange_s if hivemind else None,
            "pair_100mb_s_lattica": lattica.exchange_s if lattica else None,
            "peak_mb_over_payload": self._peak_mb(),
            "loop_lag_p99_ms": self.loop.p99_ms if self.loop else None,
        }

    def report(self, setting: dict[str, Any]) -> BenchReport:
        """Return tables, words and data."""
        pair = [
            {**asdict(each), "total_s": each.total_s, "has_averaged": each.has_averaged} for each in self.averagings
        ]
        data = {
            **self.headlines(),
            "one_way": [asdict(result) for result in self.one_way],
            "pair": pair,
            "loop": asdict(self.loop) if self.loop else None,
            "problems": self.problems,
        }
        return BenchReport(setting, self.grids(), data, [self.summary(), *missing(self.problems)])

    def grids(self) -> list[Grid]:
        """Return tables of one-way rates and costs, pairs, and the event loop, if measured."""
        grids = [one_way_grid(self.one_way), cost_grid(self.one_way)] if self.one_way else []
        if self.averagings:
            grids.append(pair_grid(self.averagings, self.vector_mb))
        if self.loop:
            grids.append(loop_grid(self.loop))
        return grids

    def summary(self) -> str:
        """Return the headlines in words."""
        sentences: list[str] = []
        if (share := self._bulk_over_raw()) is not None:
            least_mb = min(LARGE_MB, max(result.size_mb for result in self.one_way))
            sentences.append(f"From {least_mb} MB on the bulk channel has at least {share:.2f} of a raw socket's rate.")
        ours = self._averaging("farandole", "fp32, new channel")
        as_a_round = self._averaging("farandole", "fp32, new channel, as a round")
        sentences.extend(
            f"The exchange of fp32 is {theirs.exchange_s / ours.exchange_s:.1f} times as fast as {who}'s, "
            f"from vector to mean {theirs.total_s / ours.total_s:.1f} times; a whole round of ours, outer step "
            f"included, takes {as_a_round.total_s / theirs.total_s:.2f} of the time of its averaging."
            for who in ("hivemind", "Lattica")
            if ours and as_a_round and (theirs := self._averaging(who, "fp32"))
        )
        if (share := self.headlines()["guard_over_none"]) is not None:
            sentences.append(
                f"With the guard a round's exchange, from vector to mean, takes {share:.2f} of its time without."
            )
        if (peak := self._peak_mb()) is not None:
            sentences.append(f"Over its idle self and the payload a mesh process needs at most {peak:.0f} MB.")
        return " ".join(sentences)

    def _averaging(self, who: str, how: str) -> Averaging | None:
        return next((each for each in self.averagings if (each.who, each.how) == (who, how)), None)

    def _bulk_over_raw(self) -> float | None:
        """Return the least share over all large sizes."""
        shares = {result.size_mb: result.of_raw for result in self.one_way if result.path == "bulk"}
        large = [share for size, share in shares.items() if size >= min(LARGE_MB, max(shares))]
        return min(large, default=None)

    def _peak_mb(self) -> float | None:
        """Return the greatest peak of all transfers by a mesh process, exchanges over the stream included."""
        one_way = [peak for r in self.one_way if r.path == "bulk" for peak in (r.sender_peak_mb, r.receiver_peak_mb)]
        pairs = [each.peak_mb for each in self.averagings if each.who == "farandole"]
        return greatest_of([*one_way, *pairs, self.loop.peak_mb if self.loop else None])


def run(
    out: Out = OUT,
    sizes: Annotated[
        list[int] | None, typer.Option(min=1, metavar="MB", help="Megabytes to move one way; may be repeated.")
    ] = None,
    repeats: Repeats = 5,
    peers: Annotated[bool, typer.Option(help="Measure hivemind and Lattica too, installing them once.")] = True,
    cache: Cache = CACHE,
    write: Write = None,
) -> None:
    """Measure how fast contributions move between two processes, and how raw sockets, libp2p, hivemind, Lattica do.

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
    paths: Sequence[str] = tuple(PATHS),
    ways: Sequence[tuple[str, str]] = WAYS,
    rounds: Sequence[tuple[str, str]] = ROUNDS,
) -> ExchangeFigures:
    """Measure part after part, and write the results after each; other projects only with a ``cache`` folder.

    Raises `BenchError`.
    """
    figures = ExchangeFigures(vector_mb)
    for result in measure_one_way(sorted(set(sizes_mb)), repeats, bench.log, bench.say, paths):
        figures.one_way.append(result)
        bench.write(figures.report(bench.setting))
    pairs = measure_pairs(vector_mb, repeats, bench.log, cache, bench.say, ways, rounds)
    figures.averagings, figures.problems = pairs
    bench.write(figures.report(bench.setting))
    figures.loop = measure_loop_lag(loop_mb, repeats, bench.log, bench.say)
    return figures
