"""The benchmark of exchanges: the speed and cost of moving contributions, and the same for other projects.

All figures are between processes on loopback. Variants take turns in the same run, so that other load on the machine
hits all of them alike; figures are medians. A megabyte is 10^6 bytes.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from cryptography.hazmat.backends.openssl import backend

from .loop import LoopLag, loop_grid, measure_loop_lag
from .mesh import LATTICA, OURS, MeshCost, measure_mesh, mesh_grid
from .one_way import OneWay, cost_grid, measure_one_way, one_way_grid
from .pair import WAYS, Averaging, measure_pairs, pair_grid
from .process import REQUIREMENTS, greatest_of
from .report import CACHE, OUT, Bench, BenchReport, Cache, Claim, Out, Repeats, Write, missing, open_bench
from .worker.paths import PATHS

SIZES_MB: Final = (1, 16, 64, 256, 1_024)
VECTOR_MB: Final = 100
LOOP_MB: Final = 1_024
MESH_REQUESTS: Final = 200
# The share of the raw socket is for payloads of at least this number of megabytes, or for the largest.
LARGE_MB: Final = 256


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
        grids = [one_way_grid(self.one_way), cost_grid(self.one_way)] if self.one_way else []
        grids += [pair_grid(self.averagings, self.vector_mb)] if self.averagings else []
        grids += [loop_grid(self.loop)] if self.loop else []
        grids += [mesh_grid(self.mesh, self.vector_mb)] if self.mesh else []
        data = {**asdict(self), "bulk_over_raw": self.bulk_over_raw(), "peak_mb_over_payload": self.peak_mb()}
        return BenchReport(setting, grids, data, missing(self.problems), claims=[*self.claims()])

    def claims(self) -> Iterator[Claim]:
        """Yield what is compared with the other projects, and what has a limit."""
        ours = {each.how: each for each in self.averagings if each.who == "farandole"}
        theirs = {each.name: each for each in self.averagings}
        if exact := ours.get("fp32, new channel"):
            for who in ("hivemind", LATTICA):
                other, words = theirs.get(f"{who}, fp32"), f"{self.vector_mb} MB of fp32; theirs: {who}"
                if other is not None:
                    seconds = (f"{exact.exchange_s:.3f}", f"{other.exchange_s:.3f}")
                    yield Claim(f"seconds in which two peers exchange {words}", *seconds)
                    yield Claim(f"seconds from vector to mean, {words}", f"{exact.total_s:.3f}", f"{other.total_s:.3f}")
        if (share := self.bulk_over_raw()) is not None:
            least_mb = min(LARGE_MB, max(result.size_mb for result in self.one_way))
            yield Claim(f"least share of a raw socket's rate on the bulk channel, from {least_mb} MB", f"{share:.2f}")
        if self.loop:
            moved = f"{self.loop.moved_mb:,} MB move both ways"
            yield Claim(f"milliseconds that the event loop is late while {moved}, p99", f"{self.loop.p99_ms:.2f}")
        if (peak := self.peak_mb()) is not None:
            yield Claim("most memory of a mesh process over its idle self and the payload, MB", f"{peak:.0f}")
        mesh = {row[0]: row[1:] for row in mesh_grid(self.mesh, self.vector_mb).rows}
        for index, what in enumerate(mesh_grid((), self.vector_mb).header[1:]):
            if OURS in mesh and what != "request of 200 kB, ms":
                lattica = mesh.get(LATTICA)
                words = f"between two programs: {what}; theirs: Lattica's SDK"
                yield Claim(words, mesh[OURS][index], lattica[index] if lattica else "")

    def bulk_over_raw(self) -> float | None:
        """Return the least share over all large sizes."""
        shares = {result.size_mb: result.of_raw for result in self.one_way if result.path == "bulk"}
        large = [share for size, share in shares.items() if size >= min(LARGE_MB, max(shares))]
        return min(large, default=None)

    def peak_mb(self) -> float | None:
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
    write: Write = False,
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
    mesh_requests: int = MESH_REQUESTS,
) -> ExchangeFigures:
    """Measure part after part, and write the results after each; other projects only with a ``cache`` folder.

    Raises `BenchError`.
    """
    figures = ExchangeFigures(vector_mb)
    for result in measure_one_way(sorted(set(sizes_mb)), repeats, bench.log, bench.say, paths):
        figures.one_way.append(result)
        bench.write(figures.report(bench.setting))
    figures.averagings, figures.problems = measure_pairs(vector_mb, repeats, bench.log, cache, bench.say, ways)
    bench.write(figures.report(bench.setting))
    figures.loop = measure_loop_lag(loop_mb, repeats, bench.log, bench.say)
    bench.write(figures.report(bench.setting))
    figures.mesh, dropped = measure_mesh(bench.out, vector_mb, mesh_requests, repeats, cache, bench.say)
    figures.problems |= dropped
    return figures
