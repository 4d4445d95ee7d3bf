"""Any home reaches any home: two nodes of a run behind routers of every pair of kinds.

Each pair is a play (`farandole.testnet.play.launch`) of four nodes in the NAT lab: two public ones, which relay, and
one in a home of each kind. They learn of each other through the run state, connect, and become direct if they can. The
play ends once every node has exchanged contributions with every other, over whatever path there is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from farandole.node.status.status import NodeStatus

from ..natlab.kinds import KINDS, can_connect, can_punch_tcp, kind_named
from ..play.launch import Testnet, play_and_report
from ..play.places import NUM_RELAYS
from ..play.process import NodeProcess
from ..play.report import Merged
from ..play.scenario import Scenario, parse_scenario
from ..report.section import Grid, cell
from .process import BenchError
from .report import OUT, Bench, Claim, Out, Write, open_bench

# Limit.
MAX_CONNECT_SECONDS: Final = 30.0
RELAYED: Final = "relayed"
_RUN: Final = {
    "name": "bench-nat",
    "model": "0.5M",
    "inner": {"batch_size": 1},
    "outer": {"codec": "fp32"},
    "rounds": {"inner_steps": 0, "round_seconds": 2.0, "exchange_seconds": 10.0},
}
# Exchanges of each node: while a direct connection may come where plain sockets find a way, and otherwise.
NUM_EXCHANGES, NUM_WAYLESS = 12, 4
HEADER: Final = ("homes", "plain sockets", "connection", "connected, s", "direct, s", "exchange by", "exchange, s")


Pair = tuple[str, str]
ALL_PAIRS: Final = tuple(itertools.combinations_with_replacement(KINDS, 2))


def parse_pair(text: str) -> Pair:
    """Parse ``KIND/KIND``; raises `BenchError`, or `KindError` for an unknown kind."""
    near, separator, far = text.partition("/")
    if not separator:
        raise BenchError(f"{text!r} is no pair of homes: say two kinds with a slash between, such as carrier/full-cone")
    return kind_named(near).name, kind_named(far).name


def theory_of(pair: Pair) -> str:
    """Return how plain sockets get through at best: "direct", "punched", or only "relayed"."""
    near, far = map(kind_named, pair)
    if can_connect(near, far) or can_connect(far, near):
        return "direct"
    return "punched" if can_punch_tcp(near, far) else RELAYED


@dataclass(slots=True)
class PairResult:
    """The result of one pair. Seconds are counted from the later one's start, and by statuses, one a second."""

    near: str
    far: str
    theory: str
    """`theory_of`."""
    path: str = ""
    """Final path of the connection: "direct", "punched", "relayed"; "" for none."""
    connected_s: float | None = None
    direct_s: float | None = None
    way: str = ""
    """Path of their last exchange: "bulk", "stream", "relayed stream"."""
    exchange_s: float | None = None
    failure: str = ""
    """Why the play failed, such as that there was no exchange."""

    @property
    def name(self) -> str:
        """Return the name of the pair."""
        return f"{self.near} / {self.far}"

    def misses(self) -> Iterator[str]:
        """Yield the limits and expectations that the pair missed."""
        if self.connected_s is None:
            yield f"{self.name}: not connected"
        elif self.connected_s > MAX_CONNECT_SECONDS:
            yield f"{self.name}: connected only after {self.connected_s:.0f} s"
        if self.path == RELAYED != self.theory:
            yield f"{self.name}: relayed, where plain sockets get through"
        if self.failure:
            yield f"{self.name}: {self.failure}"

    def cells(self) -> list[str]:
        """Return the cells of the table."""
        seconds = [cell(each, "{:.1f}") for each in (self.connected_s, self.direct_s, self.exchange_s)]
        return [self.name, self.theory, self.path or "none", *seconds[:2], self.way or "none", seconds[2]]

    def observe(self, status: NodeStatus, other: str, seconds: float) -> None:
        """Note how a node reaches the other one, ``seconds`` after the later one's start."""
        self.path = next((member.path for member in status.members if member.peer_id == other), "")
        if self.path and self.connected_s is None:
            self.connected_s = seconds
        if self.path not in ("", RELAYED) and self.direct_s is None:
            self.direct_s = seconds
        for exchange in status.recent_exchanges:
            if exchange.partner == other and exchange.verdict == "committed":
                self.exchange_s = exchange.seconds
                self.way = f"relayed {exchange.path}" if self.path == RELAYED else exchange.path


def publish(bench: Bench, rows: Sequence[PairResult]) -> None:
    """Publish the results of all pairs."""
    total = len(rows)
    connected = [row.connected_s for row in rows if row.connected_s is not None]
    direct = [row for row in rows if row.path not in ("", RELAYED)]
    possible = sum(row.theory != RELAYED for row in rows)
    in_time = sum(seconds <= MAX_CONNECT_SECONDS for seconds in connected)
    claims = [
        Claim(f"pairs of homes connected within {MAX_CONNECT_SECONDS:g} s, of {total}", f"{in_time}"),
        Claim("seconds to a connection, the slowest pair", f"{max(connected, default=0.0):.1f}"),
        Claim("pairs with a direct connection; theirs: of plain sockets", f"{len(direct)}", f"{possible}"),
        Claim(f"pairs that exchange, of {total}", f"{sum(not row.failure for row in rows)}"),
    ]
    misses = [miss for row in rows for miss in row.misses()]
    grids = [Grid("Two nodes in homes behind routers of these kinds", HEADER, [row.cells() for row in rows])]
    bench.publish(claims, {"rows": [asdict(row) for row in rows]}, misses=misses, grids=grids)


def scenario_of(pair: Pair) -> Scenario:
    """Return the scenario in which two homes of these kinds meet."""
    homes = [{"kind": kind} for kind in (*["open"] * NUM_RELAYS, *pair)]
    num_exchanges = NUM_WAYLESS if theory_of(pair) == RELAYED else NUM_EXCHANGES
    settings: dict[str, Any] = {"run": _RUN, "home": homes, "nodes": len(homes)}
    return parse_scenario({**settings, "rounds": 256, "exchanges_after_faults": num_exchanges})


def measure_pair(pair: Pair, folder: Path) -> PairResult:
    """Play one pair in a folder, which an earlier play may have left."""
    row = PairResult(*pair, theory_of(pair))
    began_at: float | None = None

    def watch(nodes: Sequence[NodeProcess], seconds: float) -> None:
        nonlocal began_at
        near, far = nodes[NUM_RELAYS:]
        if far.joined.is_set() and began_at is None:
            began_at = seconds
        if began_at is not None and near.is_running and near.record.status is not None:
            row.observe(near.record.status, far.report.peer_id, seconds - began_at)

    # No loss is needed here.
    testnet = Testnet(scenario_of(pair), folder, lambda _: None, measure=lambda *_: Merged(0.0, 0.0, 0.0), watch=watch)
    row.failure = "; ".join(play_and_report(testnet).reasons)
    return row


def run(
    pairs: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND/KIND", help="Two kinds of homes; may be repeated.", show_default="all 55"),
    ] = None,
    out: Out = OUT,
    write: Write = False,
) -> None:
    """Measure how any home reaches any home: two nodes behind routers of each pair of kinds connect, and exchange.

    In the NAT lab (Linux, root, nftables, miniupnpd). Kinds: open, firewall, full-cone, address-restricted,
    port-restricted, symmetric, carrier, udp-blocked, https-only, upnp.

    Examples: [cyan]sudo .venv/bin/farandole testnet bench nat[/cyan];
    [cyan]sudo .venv/bin/farandole testnet bench nat --pairs carrier/full-cone --pairs symmetric/symmetric[/cyan]
    """
    chosen = [parse_pair(pair) for pair in pairs or ()] or ALL_PAIRS
    with open_bench("nat", out, write, title="Any home reaches any home") as bench:
        rows = []
        for pair in chosen:
            rows.append(row := measure_pair(pair, (out / "nat").absolute()))
            words = ", ".join(f"{name} {cell}" for name, cell in zip(HEADER[1:], row.cells()[1:], strict=True) if cell)
            bench.say(f"{row.name}: {words}")
        publish(bench, rows)
