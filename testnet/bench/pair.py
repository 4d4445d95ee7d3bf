"""Two peers average a vector: farandole's nodes, hivemind's averagers, and peers that Lattica connects.

Each starts from the same two random vectors, and what each peer holds afterwards is compared with their mean.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from farandole.node.base.system.memory import counted_size
from farandole.training.codec import encoded_size

from .environments import obtain_python
from .process import (
    MB,
    BenchError,
    BenchWorker,
    Say,
    ask_both,
    elapsed,
    greatest_of,
    median_of,
    open_payload,
    open_worker,
    worker_command,
)

WARM_UPS: Final = 2
# Lattica's connections come to speed slowly: its first calls take several times as long as its tenth.
LATTICA_WARM_UPS: Final = 8
# What a mean of two standard normal vectors may be off by, root mean square, and count as averaged: those of 8 bits are
# off by 0.01; who changed nothing is off by 0.7.
MAX_RMS_ERROR: Final = 0.1
CONNECT_TIMEOUT: Final = 20.0
CONNECT_INTERVAL: Final = 0.1

# (codec, way): see `node.Way`. The exchange by itself: the trainer encodes before it, decodes and averages after it.
WAYS: Final = (
    ("fp32", "new channel"),
    ("fp32", "kept channel"),
    ("fp32", "stream"),
    ("bf16", "new channel"),
    ("int8", "new channel"),
)
# The same, as a daemon's round has it: the trainer encodes, takes in and screens meanwhile, and takes an outer step.
ROUNDS: Final = (("fp32", "new channel"), ("bf16", "new channel"), ("int8", "new channel"))
HIVEMIND_CODECS: Final = ("fp32", "fp16", "8-bit")


@dataclass(frozen=True, slots=True)
class Averaging:
    """One averaging by two peers, from the first one's start to the last one's end; or medians of several."""

    who: str
    how: str
    payload_mb: float | None
    """What one peer sends the other; None where it is not known."""
    prepare_s: float | None
    """Freezing, encoding and hashing; None where it is part of the exchange."""
    exchange_s: float
    finish_s: float | None
    """Decoding and averaging; None where it is part of the exchange."""
    matchmaking_s: float | None
    """Finding each other, which counts nowhere."""
    rms_error: float
    peak_mb: float | None
    """Of the mesh process: see `Meter.running`."""

    @property
    def total_s(self) -> float:
        """From two vectors to their mean in both places."""
        return (self.prepare_s or 0.0) + self.exchange_s + (self.finish_s or 0.0)

    @property
    def has_averaged(self) -> bool:
        """Whether both peers held the mean."""
        return self.rms_error <= MAX_RMS_ERROR


Average = Callable[[], Averaging]


@dataclass(frozen=True, slots=True)
class Pairs:
    """The results, and what could not be measured."""

    results: list[Averaging]
    problems: dict[str, str]


def measure_pairs(
    vector_mb: int,
    repeats: int,
    log: Path,
    cache: Path | None,
    say: Say,
    ways: Sequence[tuple[str, str]] = WAYS,
    rounds: Sequence[tuple[str, str]] = ROUNDS,
) -> Pairs:
    """All of them in turn, again and again; without a cache folder farandole alone."""
    num_elements = vector_mb * MB // 4
    problems: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        say("averaging: starting farandole")
        contenders = dict(stack.enter_context(open_farandole(num_elements, log, ways, rounds)))
        for name, open_peer in (("hivemind", open_hivemind), ("Lattica", open_lattica)):
            if cache is not None:
                try:
                    python = obtain_python(name.lower(), cache, say)
                    say(f"averaging: starting {name}")
                    contenders |= stack.enter_context(open_peer(python, num_elements, log))
                except BenchError as error:
                    problems[name] = str(error)
        done: dict[str, list[Averaging]] = {label: [] for label in contenders}
        for index in range(-WARM_UPS, repeats):
            for label in list(contenders):
                say(f"averaging {vector_mb} MB: {'warm-up' if index < 0 else f'{index + 1} of {repeats}'}, {label}")
                try:
                    averaging = contenders[label]()
                except BenchError as error:
                    if label.startswith("farandole"):
                        raise
                    problems[label] = str(error)
                    del contenders[label]
                else:
                    if index >= 0:
                        done[label].append(averaging)
    return Pairs([_median(averagings) for averagings in done.values() if averagings], problems)


def _median(averagings: list[Averaging]) -> Averaging:
    one = averagings[0]
    return Averaging(
        who=one.who,
        how=one.how,
        payload_mb=one.payload_mb,
        prepare_s=median_of([each.prepare_s for each in averagings]),
        exchange_s=statistics.median(each.exchange_s for each in averagings),
        finish_s=median_of([each.finish_s for each in averagings]),
        matchmaking_s=median_of([each.matchmaking_s for each in averagings]),
        rms_error=max(each.rms_error for each in averagings),
        peak_mb=greatest_of([each.peak_mb for each in averagings]),
    )


@contextlib.contextmanager
def open_farandole(
    num_elements: int, log: Path, ways: Sequence[tuple[str, str]], rounds: Sequence[tuple[str, str]]
) -> Iterator[dict[str, Average]]:
    """Two nodes of two processes each, as a daemon has them: the trainer encodes, the mesh process exchanges."""
    size = encoded_size("fp32", num_elements)
    indices = itertools.count(1)
    with contextlib.ExitStack() as stack:
        nodes: list[BenchWorker] = []
        trainers: list[BenchWorker] = []
        for index in range(2):
            payloads = [open_payload(name, counted_size(size)) for name in ("outgoing", "incoming")]
            memories = [stack.enter_context(payload) for payload in payloads]
            ends = [stack.enter_context(end) for end in socket.socketpair()]
            for kind, workers, end in (("node", nodes, ends[0]), ("trainer", trainers, ends[1])):
                descriptors = [*(memory.descriptor for memory in memories), end.fileno()]
                worker = open_worker(f"{kind} {index}", worker_command(kind), log, descriptors)
                workers.append(stack.enter_context(worker))
                end.close()
        address = nodes[0].ask("open", address=None)["address"]
        nodes[1].ask("open", address=address)
        for index, trainer in enumerate(trainers):
            trainer.ask("open", address=None)
            trainer.ask("begin", index=index, num_elements=num_elements)

        def average(codec: str, way: str) -> Averaging:
            prepared = ask_both(trainers, "contribute", codec=codec)
            size = prepared[0]["size"]
            round_index = next(indices)
            for node, contribution in zip(nodes, prepared, strict=True):
                digest = contribution["digest"]
                node.put("exchange", round=round_index, codec=codec, size=size, digest=digest, way=way)
            exchanged = [node.get() for node in nodes]
            finished = ask_both(trainers, "average", codec=codec)
            averaging = Averaging(
                who="farandole",
                how=f"{codec}, {way}",
                payload_mb=size / MB,
                prepare_s=elapsed(prepared),
                exchange_s=elapsed(exchanged),
                finish_s=elapsed(finished),
                matchmaking_s=None,
                rms_error=max(answer["rms_error"] for answer in finished),
                peak_mb=greatest_of([answer["peak_mb"] for answer in exchanged]),
            )
            return _checked(averaging)

        def take_round(codec: str, way: str) -> Averaging:
            ask_both(trainers, "learn", codec=codec)
            round_index = next(indices)
            for node in nodes:
                node.put("take_round", round=round_index, codec=codec, way=way)
            for index, trainer in enumerate(trainers):
                trainer.put("take_round", is_first=index == 0)
            exchanged = [node.get() for node in nodes]
            taken = [trainer.get() for trainer in trainers]
            in_all = elapsed(taken)
            finish_s = max(answer["ended_at"] - answer["averaging_at"] for answer in taken)
            return _checked(
                Averaging(
                    who="farandole",
                    how=f"{codec}, {way}, as a round",
                    payload_mb=taken[0]["size"] / MB,
                    prepare_s=None,
                    exchange_s=in_all - finish_s,
                    finish_s=finish_s,
                    matchmaking_s=None,
                    rms_error=max(answer["rms_error"] for answer in taken),
                    peak_mb=greatest_of([answer["peak_mb"] for answer in exchanged]),
                )
            )

        contenders: dict[str, Average] = {}
        for codec, way in ways:
            contenders[f"farandole, {codec}, {way}"] = partial(average, codec, way)
        for codec, way in rounds:
            contenders[f"farandole, {codec}, {way}, as a round"] = partial(take_round, codec, way)
        yield contenders


def _checked(averaging: Averaging) -> Averaging:
    if not averaging.has_averaged:
        raise BenchError(f"{averaging.who}, {averaging.how}: not the mean, but off by {averaging.rms_error:g}")
    return averaging


@contextlib.contextmanager
def open_hivemind(python: Path, num_elements: int, log: Path) -> Iterator[dict[str, Average]]:
    """Two `DecentralizedAverager`; what is measured is the all-reduce, from when both have found each other."""
    with open_peers("hivemind", python, num_elements, log) as pair:

        def average(codec: str) -> Averaging:
            found = ask_both(pair, "find", codec=codec)
            averaged = ask_both(pair, "average")
            return Averaging(
                who="hivemind",
                how=codec,
                payload_mb=None,
                prepare_s=None,
                exchange_s=elapsed(averaged),
                finish_s=None,
                matchmaking_s=elapsed(found),
                rms_error=max(answer["rms_error"] for answer in ask_both(pair, "check", codec=codec)),
                peak_mb=None,
            )

        yield {f"hivemind, {codec}": partial(average, codec) for codec in HIVEMIND_CODECS}


@contextlib.contextmanager
def open_lattica(python: Path, num_elements: int, log: Path) -> Iterator[dict[str, Average]]:
    """Two peers that call each other with their vectors, and average with numpy."""
    with open_peers("lattica", python, num_elements, log) as pair:
        give_up_at = time.monotonic() + CONNECT_TIMEOUT
        while not all(answer["is_connected"] for answer in ask_both(pair, "empty")):
            if time.monotonic() > give_up_at:
                raise BenchError(f"Lattica: the peers did not find each other in {CONNECT_TIMEOUT:g} s")
            time.sleep(CONNECT_INTERVAL)  # Lattica can only be asked

        def average() -> Averaging:
            ask_both(pair, "empty")
            swapped = ask_both(pair, "swap")
            averaged = ask_both(pair, "average")
            return Averaging(
                who="Lattica",
                how="fp32",
                payload_mb=4 * num_elements / MB,
                prepare_s=None,
                exchange_s=elapsed(swapped),
                finish_s=elapsed(averaged),
                matchmaking_s=None,
                rms_error=max(answer["rms_error"] for answer in averaged),
                peak_mb=None,
            )

        for _ in range(LATTICA_WARM_UPS):
            average()
        yield {"Lattica, fp32": average}


@contextlib.contextmanager
def open_peers(name: str, python: Path, num_elements: int, log: Path) -> Iterator[list[BenchWorker]]:
    """Two peers of another project, of which the second knows the first."""
    # Not to be seen by the script's imports: the folder in which it lies.
    command = [str(python), "-P", str(Path(__file__).with_name("peer.py")), name]
    with (
        open_worker(f"{name} 0", command, log) as first,
        open_worker(f"{name} 1", command, log) as second,
    ):
        addresses = first.ask("open", index=0, num_elements=num_elements, peers=[])["addresses"]
        second.ask("open", index=1, num_elements=num_elements, peers=addresses)
        yield [first, second]
