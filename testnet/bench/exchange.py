"""The benchmark of exchanges: the speed and cost of moving contributions, and the same for other projects.

All figures are between processes on loopback. Variants take turns in the same run, so that other load on the machine
hits all of them alike; figures are medians. A megabyte is 10^6 bytes.

Two peers that average start from the same two random vectors, and what both end with is compared with the mean.
"""

from __future__ import annotations

import contextlib
import itertools
import ssl
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from cryptography.hazmat.backends.openssl import backend
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.run.manifest import manifest_from_dict, sign_manifest
from farandole.protocol.run.rules import encoded_bytes

from .process import (
    MB,
    REQUIREMENTS,
    BenchError,
    BenchWorker,
    Say,
    ask_all,
    elapsed,
    median_of,
    obtain_python,
    open_peers,
    open_workers,
    peer_command,
    take_turns,
    vectors,
    worker_command,
)
from .report import CACHE, OUT, Bench, Claim, Out, Repeats, Write, open_bench

OURS, LATTICA = "farandole", "Lattica"
SIZES_MB: Final = (256, 1_024)
VECTOR_MB: Final = 100
MESH_REQUESTS: Final = 200
CODECS: Final = ("fp32", "int8")
HIVEMIND_CODECS: Final = ("fp32", "8-bit")
COMPARED: Final = (("fp32", "hivemind, fp32"), ("fp32", f"{LATTICA}, fp32"), ("int8", "hivemind, 8-bit"))
"""Our codec, and the other project with its codec."""
WARM_UPS: Final = 2
# Lattica's connections become fast slowly: its first calls take several times as long as its tenth.
LATTICA_WARM_UPS: Final = 8
# Root mean square error of a mean of two standard normal vectors that still counts as averaged: 8-bit means are off by
# 0.01; an unchanged vector is off by 0.7.
MAX_RMS_ERROR: Final = 0.1

Figures = dict[str, float]
"""Figures of one turn, or their medians over all turns, and the greatest of those named ``most_...``.

Of an averaging: ``exchange_s``; ``total_s``, from two vectors to their mean in both places; ``most_error``, RMS; of
ours ``most_mb``, the peak memory of a node (`farandole.testnet.bench.worker.exchange.measured`).
"""
Turn = Callable[[], Figures]
"""Takes a turn, and measures it."""


def claims_of(figures: Mapping[str, Any], vector_mb: int) -> Iterator[Claim]:
    """Yield what is compared with the other projects, and what has a limit."""
    averagings, sizes, mesh = (figures[part] for part in ("averagings", "sizes", "mesh"))
    for codec, who in COMPARED:
        if who in averagings:
            ours, theirs = averagings[f"{OURS}, {codec}"], averagings[who]
            note = "" if theirs["most_error"] <= MAX_RMS_ERROR else ", which did not average"
            words = f"{vector_mb} MB of fp32 as {codec}; theirs: {who}{note}"
            seconds = {name: (f"{ours[name]:.3f}", f"{theirs[name]:.3f}") for name in ("exchange_s", "total_s")}
            yield Claim(f"seconds in which two peers exchange {words}", *seconds["exchange_s"])
            yield Claim(f"seconds from vector to mean, {words}", *seconds["total_s"])
    share = min(each["of_raw"] for each in sizes.values())
    yield Claim(f"least share of a raw socket's rate on the bulk channel, from {min(sizes)} MB", f"{share:.2f}")
    late = f"milliseconds that the event loop is late while {max(sizes):,} MB move both ways, p99"
    yield Claim(late, f"{sizes[max(sizes)]['p99']:.2f}")
    most_mb = max(each.get("most_mb", 0.0) for each in (*sizes.values(), *averagings.values()))
    yield Claim("most memory of a node over its idle self and the payload, MB", f"{most_mb:.0f}")
    kilobytes = REQUEST_BYTES // 1_000
    cells = {
        who: (f"{1e3 * each['call']:.2f}", *(f"{vector_mb / each[way]:,.0f}" for way in ("push", "fetch")))
        for who, each in mesh.items()
    }
    heads = (f"a request of {kilobytes} kB, ms", "a stream, MB/s", "a file, MB/s")
    for what, own, other in zip(heads, cells[OURS], cells.get(LATTICA, [""] * 3), strict=True):
        yield Claim(f"between two programs: {what}; theirs: Lattica's SDK", own, other)


def run(
    out: Out = OUT,
    sizes: Annotated[
        list[int] | None, typer.Option(min=1, metavar="MB", help="Megabytes to move each way; may be repeated.")
    ] = None,
    repeats: Repeats = 5,
    peers: Annotated[bool, typer.Option(help="Measure hivemind and Lattica too, installing them once.")] = True,
    write: Write = False,
) -> None:
    """Measure how fast contributions move between two processes, and how raw sockets, hivemind and Lattica do.

    Examples: [cyan]farandole testnet bench exchange[/cyan];
    [cyan]farandole testnet bench exchange --sizes 64 --sizes 256 --repeats 3 --no-peers[/cyan]
    """
    others = {name: of[0].partition("==")[2] for name, of in REQUIREMENTS.items()} if peers else {}
    others |= {"TLS": ssl.OPENSSL_VERSION, "records": backend.openssl_version_text()}
    with open_bench("exchange", out, write, title="Moving a contribution", **others, repeats=repeats) as bench:
        figures = measure(bench, sizes or SIZES_MB, repeats, CACHE if peers else None)
        bench.publish([*claims_of(figures, VECTOR_MB)], figures)


def measure(
    bench: Bench,
    sizes_mb: Sequence[int],
    repeats: int,
    cache: Path | None = None,
    vector_mb: int = VECTOR_MB,
) -> dict[str, Any]:
    """Measure part after part; other projects only with a ``cache`` folder. Raises `BenchError`."""
    log, say = bench.log, bench.say
    with open_nodes(max(sizes_mb) * MB, log) as nodes:
        rounds = itertools.count(1)
        sizes = {size_mb: measure_size(nodes, size_mb, rounds, repeats, say) for size_mb in sorted(set(sizes_mb))}
    return {
        "sizes": sizes,
        "averagings": measure_pairs(vector_mb, repeats, log, cache, say),
        "mesh": measure_mesh(bench.out, vector_mb, repeats, cache, say),
    }


@contextlib.contextmanager
def open_nodes(size: int, log: Path) -> Iterator[list[BenchWorker]]:
    """Open two connected nodes that move payloads of up to ``size`` bytes."""
    with open_workers("exchange:ExchangingNode", ["node 0", "node 1"], log) as nodes:
        first, second = ask_all(nodes, "listen", size=size)
        ask_all(nodes, "meet", [{**second, "is_initiator": False}, {**first, "is_initiator": True}])
        yield nodes


def measure_size(nodes: Sequence[BenchWorker], size_mb: int, rounds: Iterator[int], repeats: int, say: Say) -> Figures:
    """Move a payload each way at once, in turns over a plain connection and by an exchange.

    Returns the exchange's rate, its share of the plain connection's (the median of their ratios in one repeat), and the
    lag of the slower node's event loop.
    """

    def turn() -> Figures:
        plain = elapsed(ask_all(nodes, "swap", size=size_mb * MB))
        ask_all(nodes, "prepare", size=size_mb * MB)
        exchanged = ask_all(nodes, "exchange", round=next(rounds))
        ours, most_mb = elapsed(exchanged), max(each["most_mb"] for each in exchanged)
        lag_ms = {name: max(each["lag_ms"][name] for each in exchanged) for name in exchanged[0]["lag_ms"]}
        return {"mb_s": size_mb / ours, "of_raw": plain / ours, "most_mb": most_mb, **lag_ms}

    return median_of(take_turns(f"both ways: {size_mb} MB", {OURS: turn}, repeats, 1, say)[OURS])


# Two peers average


def measure_pairs(vector_mb: int, repeats: int, log: Path, cache: Path | None, say: Say) -> dict[str, Figures]:
    """Measure all pairs in turns; without a cache folder farandole alone."""
    num_elements = vector_mb * MB // 4
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(open_nodes(encoded_bytes("fp32", num_elements), log))
        ask_all(nodes, "hold", vectors(num_elements))
        rounds = itertools.count(1)
        pairs: dict[str, Turn] = {f"{OURS}, {codec}": partial(average, nodes, codec, rounds) for codec in CODECS}
        if cache is not None:
            for open_other in (open_hivemind, open_lattica):
                pairs |= stack.enter_context(open_other(cache, num_elements, log, say))
        done = take_turns(f"averaging {vector_mb} MB", pairs, repeats, WARM_UPS, say)
    return {label: median_of(turns) for label, turns in done.items()}


def average(nodes: Sequence[BenchWorker], codec: str, rounds: Iterator[int]) -> Figures:
    """Have two nodes encode, exchange and average, in one of the ``rounds``."""
    prepared = ask_all(nodes, "contribute", codec=codec)
    exchanged = ask_all(nodes, "exchange", round=next(rounds), codec=codec)
    finished = ask_all(nodes, "average", codec=codec)
    exchange_s, error = elapsed(exchanged), _error(finished)
    if error > MAX_RMS_ERROR:
        raise BenchError(f"{OURS}, {codec}: not the mean, but off by {error:g}")
    return {
        "payload_mb": prepared[0]["size"] / MB,
        "exchange_s": exchange_s,
        "total_s": elapsed(prepared) + exchange_s + elapsed(finished),
        "most_error": error,
        "most_mb": max(answer["most_mb"] for answer in exchanged),
    }


@contextlib.contextmanager
def open_hivemind(cache: Path, num_elements: int, log: Path, say: Say) -> Iterator[dict[str, Turn]]:
    """Open two `DecentralizedAverager`; the measured part is the all-reduce, once both have found each other."""
    command = peer_command(obtain_python("hivemind", cache, say), "hivemind")
    with open_peers("hivemind", command, vectors(num_elements), log) as pair:

        def average(codec: str) -> Figures:
            ask_all(pair, "find", codec=codec)
            seconds = elapsed(ask_all(pair, "average"))
            error = _error(ask_all(pair, "check", codec=codec))
            return {"exchange_s": seconds, "total_s": seconds, "most_error": error}

        yield {f"hivemind, {codec}": partial(average, codec) for codec in HIVEMIND_CODECS}


@contextlib.contextmanager
def open_lattica(cache: Path, num_elements: int, log: Path, say: Say) -> Iterator[dict[str, Turn]]:
    """Open two peers that call each other with their vectors, and average with numpy."""
    command = peer_command(obtain_python("lattica", cache, say), "lattica")
    with open_peers("lattica", command, vectors(num_elements), log) as pair:
        ask_all(pair, "connect")

        def average() -> Figures:
            ask_all(pair, "empty")
            exchange_s, averaged = elapsed(ask_all(pair, "swap")), ask_all(pair, "average")
            return {"exchange_s": exchange_s, "total_s": exchange_s + elapsed(averaged), "most_error": _error(averaged)}

        for _ in range(LATTICA_WARM_UPS):
            average()
        yield {f"{LATTICA}, fp32": average}


def _error(answers: Sequence[dict[str, Any]]) -> float:
    return max(float(answer["rms_error"]) for answer in answers)


# What a mesh costs the programs that use it: farandole's `Mesh`, and Lattica's SDK
#
# Two programs on loopback, each a process. Those of farandole use a daemon each, as on a volunteer's machine: bytes go
# from the program over a local socket to its node, encrypted to the other node, and to the other program. Lattica is in
# the programs' own processes. Nothing is measured before both are connected.

REQUEST_BYTES: Final = 1_000
_RUN: Final = {
    "name": "bench-mesh",
    "model": {"num_layers": 1, "width": 16, "num_heads": 2, "hidden": 32, "context": 16, "vocabulary": 256},
}


def measure_mesh(folder: Path, size_mb: int, repeats: int, cache: Path | None, say: Say) -> dict[str, dict[str, float]]:
    """Measure both in turns; without a cache folder, not Lattica.

    Of each, in seconds: ``call``, a request of `REQUEST_BYTES`, whose answer is as long; ``push``, until as many bytes
    as asked for are at the other program, on a stream; ``fetch``, of a file of as many bytes, with its hashes.
    """
    log, manifest = folder / "mesh.log", (folder / "mesh.manifest").absolute()
    say("mesh: starting two daemons")
    manifest.write_bytes(sign_manifest(manifest_from_dict(_RUN), Ed25519PrivateKey.generate()).encode())
    places = [manifest.with_name(f"mesh-{name}") for name in ("first", "second")]
    with contextlib.ExitStack() as stack:
        ours = [{"manifest": str(manifest), "place": str(place)} for place in places]
        programs: list[Any] = [(OURS, worker_command("exchange:MeshProgram"), ours)]
        if cache is not None:
            programs.append((LATTICA, peer_command(obtain_python("lattica", cache, say), "lattica"), [{}, {}]))
        turns: dict[str, Turn] = {}
        for who, command, each in programs:
            pair = stack.enter_context(open_peers(who, command, each, log))
            ask_all(pair, "connect")
            turns[who] = partial(_measure, pair, size_mb * MB)
        done = take_turns("mesh", turns, repeats, WARM_UPS, say)
    return {who: median_of(turns) for who, turns in done.items()}


def _measure(pair: Sequence[BenchWorker], size: int) -> dict[str, float]:
    giver, asker = pair
    seconds = asker.ask("call", number=MESH_REQUESTS, size=REQUEST_BYTES)["seconds"]
    push = elapsed([asker.ask("push", size=size)])
    file = giver.ask("share", size=size)["file"]
    fetch = elapsed([asker.ask("fetch", file=file, size=size)])
    return {"call": statistics.median(seconds), "push": push, "fetch": fetch}
