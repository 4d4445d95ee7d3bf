"""What a mesh costs the programs that use it: farandole's `Mesh`, Lattica's SDK, and a plain TCP socket.

Two programs on loopback, each a process. Those of farandole use a daemon each, as on a volunteer's machine: bytes go
from the program over a local socket to its node, encrypted to the other node, and to the other program. Lattica's and
the socket are in the programs' own processes. Nothing is measured from before both are connected.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from ..natlab.groups import open_leash
from ..report.section import Grid
from .daemon import running_daemon, sign_run, wait_for_node
from .environments import obtain_python
from .process import MB, BenchError, BenchWorker, Say, ask_all, elapsed, open_worker, take_turns
from .report import CACHE, OUT, BenchReport, Cache, Out, Repeats, Write, missing, open_bench

KB: Final = 1_000
REQUEST_BYTES: Final = (KB, 200 * KB)
# A peer may begin 32 streams a second (`farandole.node.mesh.connection`); so few are far from its limit.
NEW_STREAMS: Final = 20
WARM_UPS: Final = 2
CONNECT_TIMEOUT: Final = 60.0
CONNECT_INTERVAL: Final = 0.1
OURS: Final = "farandole.Mesh"
ANEW: Final = f"{OURS}, a new stream each"
LATTICA: Final = "Lattica"
SOCKET: Final = "TCP socket"


@dataclass(frozen=True, slots=True)
class MeshCost:
    """One turn of one way; or medians of several."""

    calls: dict[int, tuple[float, float]]
    """Size of a request, and of its answer, in bytes -> median and 99th percentile, in seconds."""
    push: float | None = None
    """Seconds in which bytes arrive at the other program, on a stream."""
    fetch: float | None = None
    """Seconds in which a file of as many bytes is fetched."""


Measure = Callable[[], MeshCost]


def run(
    size: Annotated[int, typer.Option(min=1, help="Size of the stream and of the file, in megabytes.")] = 100,
    requests: Annotated[int, typer.Option(min=2, help="Requests of each size in a turn.")] = 200,
    repeats: Repeats = 5,
    peers: Annotated[bool, typer.Option(help="Measure Lattica, too.")] = True,
    cache: Cache = CACHE,
    out: Out = OUT,
    write: Write = None,
) -> None:
    """Measure requests, streams and files of programs that use a mesh, compared with Lattica's SDK (2 minutes).

    Example: [cyan]farandole testnet bench mesh --size 20 --repeats 2[/cyan]
    """
    with open_bench("mesh", out, write, size=size, requests=requests, repeats=repeats) as bench:
        done, problems = measure(out, size, requests, repeats, cache if peers else None, bench.say)
        bench.publish(report(bench.setting, size, done, problems))


def measure(
    folder: Path, size: int, requests: int, repeats: int, cache: Path | None, say: Say
) -> tuple[dict[str, MeshCost], dict[str, str]]:
    """Measure all in turns, and return what could not be measured; without a cache folder, not Lattica."""
    problems: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        say("starting two daemons")
        homes = stack.enter_context(_open_nodes(folder))
        log = folder / "mesh.log"
        ours = stack.enter_context(_open_pair("farandole", Path(sys.executable), [str(home) for home in homes], log))
        plain = stack.enter_context(_open_pair("socket", Path(sys.executable), ["", ""], log))
        ways: dict[str, Measure] = {
            SOCKET: partial(_measure, plain, requests, size, has_files=False),
            OURS: partial(_measure, ours, requests, size),
            ANEW: partial(_measure_anew, ours, min(requests, NEW_STREAMS)),
        }
        others: dict[str, Measure] = {}
        if cache is not None:
            try:
                python = obtain_python("lattica", cache, say)
                pair = stack.enter_context(_open_pair("lattica", python, ["", ""], log))
                others[LATTICA] = partial(_measure, pair, requests, size)
            except BenchError as error:
                problems[LATTICA] = str(error)
        done, dropped = take_turns("mesh", ways | others, others, repeats, WARM_UPS, say)
    return {name: _median(each) for name, each in done.items() if each}, problems | dropped


@contextlib.contextmanager
def _open_nodes(folder: Path) -> Iterator[list[Path]]:
    """Run two connected nodes, and return their homes."""
    signed, homes = sign_run(), [(folder / f"mesh-{name}").absolute() for name in ("first", "second")]
    with open_leash() as leash, running_daemon(leash, homes[0], signed):
        first = wait_for_node(homes[0], lambda status: status.phase == "paused")
        with running_daemon(leash, homes[1], signed, ["--bootstrap", first.addresses[0]]):
            for home in homes:
                wait_for_node(home, lambda status: status.run.members_live >= 2)
            yield homes


@contextlib.contextmanager
def _open_pair(kind: str, python: Path, places: list[str], log: Path) -> Iterator[list[BenchWorker]]:
    """Open two connected programs; of the second, figures are taken."""
    # ``-P`` hides the script's own folder from its imports.
    command = [str(python), "-P", str(Path(__file__).with_name("peer.py")), f"mesh_{kind}"]
    with open_worker(f"{kind} 0", command, log) as first, open_worker(f"{kind} 1", command, log) as second:
        addresses = first.ask("open", place=places[0], peers=[])["addresses"]
        second.ask("open", place=places[1], peers=addresses)
        give_up_at = time.monotonic() + CONNECT_TIMEOUT
        while not all(answer["is_connected"] for answer in ask_all([first, second], "is_connected")):
            if time.monotonic() > give_up_at:
                raise BenchError(f"{kind}: the programs did not find each other in {CONNECT_TIMEOUT:g} s")
            time.sleep(CONNECT_INTERVAL)  # there is no event for it, so poll
        yield [first, second]


def _measure(pair: list[BenchWorker], requests: int, size: int, *, has_files: bool = True) -> MeshCost:
    calls = _calls(pair[1], "call", requests)
    push = elapsed([pair[1].ask("push", size=size * MB)])
    if not has_files:
        return MeshCost(calls, push)
    shared = pair[0].ask("share", size=size * MB)
    return MeshCost(calls, push, elapsed([pair[1].ask("fetch", file=shared["file"], size=size * MB)]))


def _measure_anew(pair: list[BenchWorker], requests: int) -> MeshCost:
    return MeshCost(_calls(pair[1], "call_anew", requests))


def _calls(worker: BenchWorker, do: str, requests: int) -> dict[int, tuple[float, float]]:
    answers = {size: sorted(worker.ask(do, number=requests, size=size)["seconds"]) for size in REQUEST_BYTES}
    return {size: (statistics.median(each), each[int(0.99 * len(each))]) for size, each in answers.items()}


def _median(turns: list[MeshCost]) -> MeshCost:
    def median(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    return MeshCost(
        {
            size: (
                statistics.median(turn.calls[size][0] for turn in turns),
                statistics.median(turn.calls[size][1] for turn in turns),
            )
            for size in REQUEST_BYTES
        },
        median([turn.push for turn in turns]),
        median([turn.fetch for turn in turns]),
    )


def report(
    setting: Mapping[str, Any], size: int, done: Mapping[str, MeshCost], problems: Mapping[str, str]
) -> BenchReport:
    """Return the table, words and data."""

    def rate(seconds: float | None) -> str:
        return "" if seconds is None else f"{size / seconds:,.0f}"

    header = ["programs", *(f"request of {each // KB} kB, ms" for each in REQUEST_BYTES), "stream, MB/s", "file, MB/s"]
    rows = [
        [
            name,
            *(f"{p50 * 1e3:.2f} / {p99 * 1e3:.2f}" for p50, p99 in cost.calls.values()),
            rate(cost.push),
            rate(cost.fetch),
        ]
        for name, cost in done.items()
    ]
    words = [
        "Of a request: median / 99th percentile of the time from sending it to its answer, which is as long. *Stream*: "
        f"{size} MB to the other program; *file*: as many that the other program shares and this one fetches, with "
        "their hashes. Medians of the turns. A node takes 32 new streams a second from a peer, after 128 at once: more "
        "requests need a stream that stays open.",
        *missing(problems),
    ]
    grid = Grid("What a mesh costs programs", header, rows)
    return BenchReport(setting, [grid], {name: asdict(cost) for name, cost in done.items()}, words)
