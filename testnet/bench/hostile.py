"""The benchmark of a hostile internet: the harm that strangers can do to a node.

A node, its attackers and an honest dialer are a process each. During an attack, newcomers dial all the time, each with
a key of its own, and wait for an answer; the node's memory, descriptors and tasks are read between dials. The
attackers target the port that the benchmark has opened on loopback, and nothing else
(`farandole.testnet.bench.worker.hostile_attacks`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from .process import Say, open_workers
from .report import OUT, Bench, Claim, Out, Write, open_bench
from .worker.hostile_attacks import ATTACKS, RAW

# Longer than the handlers of a lost connection take, and than a handshake.
SETTLE_SECONDS: Final = 8.0
# Seconds of honest dials between two readings of the node, and the pause after each dial.
DIAL_SECONDS, DIAL_PAUSE = 2.0, 0.2


@dataclass(slots=True)
class FloodResult:
    """The figures of one part."""

    name: str
    over_mb: float
    """Peak memory above that before."""
    left_over: dict[str, int]
    """Descriptors and tasks at the end, above those before."""
    dials: int = 0
    dial_max: float | None = None
    failures: list[str] = field(default_factory=list)


LIMITS: Final[Sequence[tuple[str, str, float, Callable[[FloodResult], float]]]] = (
    ("slowest honest dial, seconds", "{:.2f}", 2.0, lambda row: row.dial_max or 0.0),
    ("honest dials that failed, of {dials:,}", "{:.0f}", 0.0, lambda row: len(row.failures)),
    ("memory above that before, MB", "{:.0f}", 64.0, lambda row: row.over_mb),
    # The library's own timers may remain.
    ("tasks and descriptors left over", "{:.0f}", 3.0, lambda row: max(0, *row.left_over.values())),
)
"""What is limited, its form, its limit, and its figure of a part."""

Flood = tuple[str, dict[str, Any]]
"""The name of a part, and its `farandole.testnet.bench.worker.hostile.flood`."""


def floods(silent: int, garbage: int, per_second: float) -> list[Flood]:
    """Return the parts of the benchmark; an attack from one address has the honest dialer's."""
    every: dict[str, Any] = {"kinds": list(ATTACKS), "number": garbage, "per_second": per_second, "patience": 2.0}
    silence = {"kinds": ["silence"], "number": silent, "patience": 10.0}
    fast = {"kinds": list(RAW), "per_second": 10 * per_second, "patience": 10.0}
    return [
        ("silent sockets, one address", {**every, **silence, "per_second": 10 * per_second, "sources": 1}),
        ("garbage of all kinds, one address", {**every, "sources": 1}),
        ("garbage of all kinds, 1,000 addresses", {**every, "sources": 1_000}),
        ("garbage before authentication, ten times as fast", {**every, **fast, "sources": 1_000}),
    ]


def publish(bench: Bench, rows: Sequence[FloodResult]) -> None:
    """Publish the worst of all parts."""
    dials = sum(row.dials + len(row.failures) for row in rows)
    claims = [
        Claim(f"{what.format(dials=dials)} (limit {limit:g})", form.format(max(map(figure, rows))))
        for what, form, limit, figure in LIMITS
    ]
    misses = [
        f"{row.name}: {what.format(dials=dials)}: {form.format(figure(row))}, not at most {limit:g}"
        for row in rows
        for what, form, limit, figure in LIMITS
        if figure(row) > limit
    ]
    bench.publish(claims, {"rows": [asdict(row) for row in rows]}, misses=misses)


def measure(plans: Sequence[Flood], log: Path, say: Say) -> list[FloodResult]:
    """Play each flood, and dial meanwhile; each on a fresh node, as remains of one would hide the cost of the next."""
    rows = []
    for name, flood in plans:
        with (
            open_workers("hostile:AttackedNode", ["attacked node"], log) as (node,),
            open_workers("hostile", ["attackers", "honest dialler"], log) as (attackers, dialler),
        ):
            address = node.ask("address")["address"]
            dialling = {"address": address, "seconds": DIAL_SECONDS, "interval": DIAL_PAUSE}
            dialler.ask("dial", **dialling)
            looks = [node.ask("figures")]
            dials: list[float] = []
            failures: list[str] = []
            _, _, _, _, port, _, peer = address.split("/")
            attackers.put("flood", port=int(port), peer=peer, **flood)
            while not attackers.has_answered(0.0):
                answer = dialler.ask("dial", **dialling)
                dials += answer["times"]
                failures += answer["failures"]
                looks.append(node.ask("figures"))
                say(f"{name}: {len(dials)} honest dials, the slowest {max(dials, default=0.0):.2f} s")
            attackers.get()
            time.sleep(SETTLE_SECONDS)
            looks.append(node.ask("figures"))
        first, last = looks[0], looks[-1]
        rows.append(
            FloodResult(
                name=name,
                over_mb=max(look["rss_mb"] for look in looks) - first["rss_mb"],
                left_over={what: last[what] - first[what] for what in ("descriptors", "tasks")},
                dials=len(dials),
                dial_max=max(dials, default=None),
                failures=failures,
            )
        )
    return rows


def run(
    silent: Annotated[int, typer.Option(min=1, help="Sockets that send nothing.")] = 1_000,
    garbage: Annotated[int, typer.Option(min=1, help="Connections that send garbage, in each part.")] = 20_000,
    rate: Annotated[float, typer.Option(min=1, help="Connections that send garbage, a second.")] = 100.0,
    out: Out = OUT,
    write: Write = False,
) -> None:
    """Measure what strangers can do to a node on loopback, and how honest newcomers fare meanwhile.

    Examples: [cyan]farandole testnet bench hostile[/cyan];
    [cyan]farandole testnet bench hostile --silent 200 --garbage 1000[/cyan]
    """
    with open_bench("hostile", out, write, title="A hostile internet") as bench:
        rows = measure(floods(silent, garbage, rate), bench.log, bench.say)
        publish(bench, rows)
