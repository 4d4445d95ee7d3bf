"""Any home reaches any home: two members of a run behind routers of every pair of kinds.

In the NAT lab (`farandole.testnet.natlab`) a run has two public members, which relay. For each pair of kinds two
newcomers (`farandole.testnet.bench.worker.nat`: a node without a trainer) join it from fresh homes at the same time,
with an invite from the public members. They learn of each other through the run state, connect, and become direct if
they can. Then they exchange contributions over whatever path there is, and leave.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import trio
import typer

from farandole.node.base.nurseries import own_error

from ..natlab.groups import open_leash
from ..natlab.kinds import HTTPS_PORT, KINDS, can_connect, can_punch_tcp, kind_named
from ..natlab.lab import Lab, open_lab
from ..report.section import Grid, cell
from .process import BenchError, BenchWorker, open_worker, worker_command
from .report import OUT, Bench, Claim, Out, Write, open_bench

# Limits.
MAX_CONNECT_SECONDS: Final = 30.0
# Timeout for a connection, longer than the limit: it distinguishes a late connection from one that never comes.
CONNECT_PATIENCE: Final = 90.0
# Timeouts for a direct connection: where plain sockets find a way, and otherwise, until all attempts are over.
DIRECT_PATIENCE, WAYLESS_PATIENCE = 60.0, 20.0
# A node keeps two relays and compares what two witnesses see.
NUM_PUBLIC: Final = 2
PUBLIC_PATIENCE: Final = 60.0
# Size of the fp32 contribution, one way.
EXCHANGE_BYTES: Final = 4_000_000
RELAYED: Final = "relayed"
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
    """The result of one pair. Seconds are counted from when both began to join, and are the later member's."""

    near: str
    far: str
    theory: str
    """`theory_of`."""
    path: str = ""
    """Final path of the connection: "direct", "punched", "relayed"; "" for none."""
    connected_s: float | None = None
    direct_s: float | None = None
    way: str = ""
    """Path of the exchange: "bulk", "stream", "relayed stream"."""
    exchange_s: float | None = None
    failure: str = ""
    """Why there was no exchange, or why its two ends disagree."""

    @property
    def name(self) -> str:
        """Return the name of the pair."""
        return f"{self.near} / {self.far}"

    def misses(self) -> list[str]:
        """Return the limits and expectations that the pair missed."""
        found = []
        if self.connected_s is None:
            found.append("not connected")
        elif self.connected_s > MAX_CONNECT_SECONDS:
            found.append(f"connected only after {self.connected_s:.0f} s")
        if self.path == RELAYED != self.theory:
            found.append("relayed, where plain sockets get through")
        if self.failure:
            found.append(self.failure)
        return [f"{self.name}: {miss}" for miss in found]

    def cells(self) -> list[str]:
        """Return the cells of the table."""
        return [
            self.name,
            self.theory,
            self.path or "none",
            cell(self.connected_s, "{:.1f}"),
            cell(self.direct_s, "{:.1f}"),
            self.way or "none",
            cell(self.exchange_s, "{:.1f}"),
        ]


def publish(bench: Bench, rows: Sequence[PairResult]) -> None:
    """Publish the results of all pairs."""
    title = f"Two homes behind routers of these kinds, and an exchange of {EXCHANGE_BYTES // 10**6} MB both ways"
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
    grids = [Grid(title, HEADER, [row.cells() for row in rows])]
    bench.publish(claims, {"rows": [asdict(row) for row in rows]}, misses=misses, grids=grids)


async def ask(worker: BenchWorker, do: str, **request: object) -> dict[str, Any]:
    """Call `BenchWorker.ask` in a thread."""
    return await trio.to_thread.run_sync(
        partial(worker.ask, do, **request),
        abandon_on_cancel=True,  # type: ignore[call-arg]  # newer than the stubs that libp2p brings
    )


async def gather(*calls: Callable[[], Any]) -> list[Any]:
    """Run all calls concurrently and return their results; the first error cancels the others, and is raised."""
    results: list[Any] = [None] * len(calls)

    async def note(index: int, call: Callable[[], Any]) -> None:
        results[index] = await call()

    try:
        async with trio.open_nursery() as nursery:
            for index, call in enumerate(calls):
                nursery.start_soon(note, index, call)
    except BaseExceptionGroup as group:  # nurseries wrap even a single error
        if group.subgroup(KeyboardInterrupt):  # it hits the commands that build homes too
            raise KeyboardInterrupt from None
        raise own_error(group) or group from None
    return results


@dataclass(frozen=True)
class NatBench:
    """Measures pairs in one lab, a few concurrently, each of these in a run of its own."""

    lab: Lab
    logs: Path
    """A folder for the log of each process."""
    say: Callable[[str], None] = lambda text: None
    """Called with what is being done."""
    tell: Callable[[PairResult], None] = lambda row: None
    """Called with each pair that is done."""
    _building: trio.Lock = field(default_factory=trio.Lock)

    async def measure(self, pairs: Sequence[Pair], at_once: int) -> list[PairResult]:
        """Return one row per pair, in order. Raises `BenchError` if the run's public members cannot be set up."""
        rows: dict[int, PairResult] = {}
        waiting = iter(enumerate(pairs))
        under_way: list[str] = []

        async def work(index: int) -> None:
            async with self._open_run(f"public-{index}") as (run, invite):
                for number, pair in waiting:
                    name = "/".join(pair)
                    under_way.append(name)
                    self.say(f"{len(rows)} of {len(pairs)} pairs done; now {', '.join(under_way)}")
                    row = PairResult(*pair, theory_of(pair))
                    try:
                        async with (
                            self._open_in(row.near, f"{row.near}-{row.far}-near") as one,
                            self._open_in(row.far, f"{row.near}-{row.far}-far") as other,
                        ):
                            await _play(row, (one, other), run, invite)
                    except BenchError as error:
                        row.failure = str(error)
                    rows[number] = row
                    under_way.remove(name)
                    self.tell(row)

        await gather(*(partial(work, index) for index in range(min(at_once, len(pairs)))))
        return [row for _, row in sorted(rows.items())]

    @contextlib.asynccontextmanager
    async def _open_run(self, name: str) -> AsyncIterator[tuple[str, dict[str, list[str]]]]:
        """Open a run with public members, on a port that every home lets out; yield its id, and an invite."""
        run = secrets.token_hex(32)
        invite: dict[str, list[str]] = {}
        async with contextlib.AsyncExitStack() as stack:
            public = [await stack.enter_async_context(self._open_in("open", f"{name}-{n}")) for n in range(NUM_PUBLIC)]
            for worker in public:
                joined = await ask(worker, "join", run=run, port=HTTPS_PORT, peers=invite)
                invite[joined["peer"]] = joined["addresses"]
            for answer in await gather(
                *(partial(ask, worker, "be_public", seconds=PUBLIC_PATIENCE) for worker in public)
            ):
                if not answer["is_public"]:
                    raise BenchError(f"the public nodes did not find out that they are public; see {self.logs}")
            yield run, invite

    @contextlib.asynccontextmanager
    async def _open_in(self, kind: str, name: str) -> AsyncIterator[BenchWorker]:
        """Start a process in a home of its own, and kill it when the block ends."""
        async with self._building:  # the lab counts its homes
            home = await trio.to_thread.run_sync(self.lab.add_home, kind)
        with open_worker(name, [*home.host.enter, *worker_command("home")], self.logs / f"{name}.log") as worker:
            yield worker
            worker.kill()


async def _play(row: PairResult, pair: tuple[BenchWorker, BenchWorker], run: str, invite: dict[str, list[str]]) -> None:
    joined = await gather(*(partial(ask, worker, "join", run=run, port=0, peers=invite) for worker in pair))
    names = [answer["peer"] for answer in joined]

    async def ask_both(do: str, **request: object) -> list[dict[str, Any]]:
        """Send each a request about the other."""
        others = zip(pair, names[::-1], strict=True)
        return await gather(*(partial(ask, worker, do, peer=other, **request) for worker, other in others))

    direct = WAYLESS_PATIENCE if row.theory == RELAYED else DIRECT_PATIENCE
    met = await ask_both("meet", connect_seconds=CONNECT_PATIENCE, direct_seconds=direct)
    row.connected_s, row.direct_s = (
        None if None in (values := [answer[what] for answer in met]) else max(values)
        for what in ("connected_s", "direct_s")
    )
    if row.connected_s is None:
        row.failure = "no exchange"
        return
    ends = await ask_both("exchange", size=EXCHANGE_BYTES)
    row.way = ends[names.index(min(names))]["way"]  # by the initiator's report, which opened it
    row.exchange_s = max(end["seconds"] for end in ends)
    # The worse of the paths that the two ends report.
    row.path = next(path for path in ("", RELAYED, "punched", "direct") if path in [end["path"] for end in ends])
    if not all(end["committed"] for end in ends):
        row.failure = f"no exchange: {'; '.join(dict.fromkeys(end['reason'] for end in ends if end['reason']))}"
    elif ends[0]["received"] != ends[1]["own"] or ends[1]["received"] != ends[0]["own"]:
        row.failure = "the two have not received what the other sent"
    elif ends[0]["mean"] != ends[1]["mean"]:
        row.failure = "the two have other means"
    await gather(*(partial(ask, worker, "leave") for worker in pair))


def run(
    pairs: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND/KIND", help="Two kinds of homes; may be repeated.", show_default="all 55"),
    ] = None,
    at_once: Annotated[int, typer.Option(min=1, max=16, help="Pairs that are tried at the same time.")] = 3,
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
    with open_bench("nat", out, write) as bench, open_leash() as leash, open_lab(leash) as lab:
        logs = out / "nat-logs"
        logs.mkdir(exist_ok=True)

        def tell(row: PairResult) -> None:
            names = ("plain sockets", "path", "connected", "direct", "exchange by", "exchange")
            words = ", ".join(f"{name} {cell}" for name, cell in zip(names, row.cells()[1:], strict=True) if cell)
            bench.say(f"{row.name}: {words}", is_miss=bool(row.misses()))

        rows = trio.run(NatBench(lab, logs, bench.say, tell).measure, chosen, at_once)
        publish(bench, rows)
