"""The time in which a newcomer gets its weights, from two donors and from one, and the cost to the others.

Each donor has a checkpoint; a newcomer needs half of it, slow weights and momentum, which is the size that counts. The
clock starts before the first donor is dialled, and stops when the file is verified and durable. For comparison a peer
of hivemind's loads the same size from another (`load_state_from_peers`) in the same run, taking turns; it keeps its
connections, and writes nothing to a disk. A megabyte is 10^6 bytes.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

import numpy as np
import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.store.consolidated.tensors import write_tensors
from farandole.node.store.folder import index_of
from farandole.protocol.checkpoints.blocks import Index, encode_signed_index, sign_index
from farandole.protocol.run.rules import OPTIMIZER_VECTORS, NoLoCoConfig, required_vectors
from farandole.protocol.wire.identity import public_bytes
from farandole.training.engine.blocks import content_of

from ..natlab.groups import open_leash
from ..natlab.lab import open_lab
from ..natlab.namespace import Location
from ..report.section import cell
from .process import (
    MB,
    BenchWorker,
    ask_all,
    elapsed,
    get_all,
    obtain_python,
    open_peers,
    open_worker,
    peer_command,
    take_turns,
    vectors,
    worker_command,
)
from .report import CACHE, OUT, Bench, Claim, Out, Repeats, Write, open_bench
from .worker.join import RUN_ID

SIZE_MB: Final = 100
# A home's line.
UP_MBIT, DOWN_MBIT, DELAY_MS = 20.0, 100.0, 7.5
# The others' rounds: the pause for inner steps, and the size of an exchange each way, over a second on that line.
ROUND_PAUSE: Final = 5.0
ROUND_MB: Final = 2
NUM_ROUNDS: Final = 4
_VECTORS: Final = (*required_vectors(NoLoCoConfig()), *OPTIMIZER_VECTORS)


def claims_of(figures: Mapping[str, Any]) -> list[Claim]:
    """Return the claims of the figures that there are; seconds are medians."""

    def known(name: str, form: str) -> str:
        return cell(figures.get(name), form)

    words = f"seconds for {figures['size_mb']} MB of weights from one donor, verified and durable; theirs: hivemind's"
    return [
        Claim(words, known("one_donor_s", "{:.2f}"), known("hivemind_s", "{:.2f}")),
        Claim("the same from two donors", known("two_donors_s", "{:.2f}")),
        Claim(f"seconds on lines of {UP_MBIT:g} Mbit/s up, over size / rate", known("link_over_ideal", "{:.2f}")),
        Claim("by how much the donors' own rounds are longer meanwhile", known("rounds_slower", "{:+.1%}")),
    ]


def make_checkpoint(path: Path, size_mb: int) -> None:
    """Write a checkpoint, half of which a newcomer needs, and its signed index next to it."""
    shapes = {f"{name}/w": (size_mb * MB // 8,) for name in _VECTORS}
    key, rng = Ed25519PrivateKey.generate(), np.random.default_rng(0)
    write_tensors(path, {}, shapes, lambda name: rng.standard_normal(shapes[name], dtype=np.float32))
    content = content_of(path)
    index = Index(
        run_id=RUN_ID,
        author=public_bytes(key),
        round=1,
        inner_steps=1,
        tokens=1,
        size=content.size,
        layout=bytes(32),
        hashes=content.hashes,
    )
    index_of(path).write_bytes(encode_signed_index(sign_index(key, index)))


@contextlib.contextmanager
def open_nodes(
    source: Path, log: Path, places: Sequence[Location]
) -> Iterator[tuple[Callable[[int], float], list[BenchWorker], list[str]]]:
    """Open a newcomer, in the first place, and its donors.

    Yields what fetches from the first so many donors and returns the seconds, the donors, and their addresses.
    """
    command, names = worker_command("join:JoiningNode"), ("newcomer", "donor 1", "donor 2")
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(open_worker(name, [*place.enter, *command], log))
            for name, place in zip(names, places, strict=True)
        ]
        opened = ask_all(workers, "open", [{"ip": place.ip} for place in places])
        addresses = [answer["address"] for answer in opened]
        ask_all(workers, "meet", addresses=addresses)
        ask_all(workers[1:], "hold", path=str(source))
        target = source.with_name("fetched.safetensors")

        def fetch(num_donors: int) -> float:
            target.unlink(missing_ok=True)
            donors = addresses[1 : num_donors + 1]
            return elapsed([workers[0].ask("fetch", path=str(source), target=str(target), donors=donors)])

        yield fetch, workers[1:], addresses[1:]


def run(
    size: Annotated[int, typer.Option(min=4, help="Megabytes that a newcomer needs.")] = SIZE_MB,
    repeats: Repeats = 5,
    peers: Annotated[bool, typer.Option(help="Measure hivemind too, installing it once.")] = True,
    link: Annotated[bool, typer.Option(help="Measure on a shaped line too; needs Linux and root.")] = True,
    out: Out = OUT,
    write: Write = False,
) -> None:
    """Measure how fast a newcomer gets its weights from two donors, from one and from hivemind's, and what it costs.

    Examples: [cyan]farandole testnet bench join[/cyan];
    [cyan]farandole testnet bench join --size 20 --repeats 1 --no-peers --no-link[/cyan]
    """
    with open_bench("join", out, write, title="Joining a run", repeats=repeats) as bench:
        figures = measure(bench, size, repeats, CACHE if peers else None, with_link=link)
        bench.publish(claims_of(figures), figures)


def measure(
    bench: Bench, size_mb: int, repeats: int, cache: Path | None = None, *, with_link: bool = True
) -> dict[str, Any]:
    """Measure on loopback, and on a shaped line; hivemind only with a ``cache`` folder.

    Raises `BenchError`, and `NamespaceError` if there can be no line here.
    """
    log, say = bench.log, bench.say
    figures: dict[str, Any] = {"size_mb": size_mb}
    with TemporaryDirectory(dir=bench.out) as place:
        source = Path(place, "join.safetensors")
        make_checkpoint(source, size_mb)
        with contextlib.ExitStack() as stack:
            fetch, _, _ = stack.enter_context(open_nodes(source, log, [Location()] * 3))
            turns: dict[str, Callable[[], float]] = {
                "two_donors_s": partial(fetch, 2),
                "one_donor_s": partial(fetch, 1),
            }
            if cache is not None:
                command = peer_command(obtain_python("hivemind", cache, say), "hivemind")
                pair = stack.enter_context(open_peers("hivemind", command, vectors(size_mb * MB // 4), log))
                turns["hivemind_s"] = lambda: elapsed([pair[1].ask("join")])
            done = take_turns("on loopback", turns, repeats, 1, say)
        figures |= {name: statistics.median(seconds) for name, seconds in done.items()}
        if with_link:
            say("on a shaped line")
            with open_leash() as leash, open_lab(leash) as lab:
                homes = [lab.add_home("open") for _ in range(3)]
                for home in homes:
                    home.set_rate(UP_MBIT, DOWN_MBIT)
                    home.set_delay(DELAY_MS)
                figures |= measure_line(source, size_mb, log, [home.host for home in homes])
    return figures


def measure_line(source: Path, size_mb: int, log: Path, places: Sequence[Location]) -> dict[str, float]:
    """Measure on a shaped line: both donors take rounds with each other, first alone, then while the newcomer joins."""
    with open_nodes(source, log, places) as (fetch, donors, addresses):

        def put_rounds(first: int) -> None:
            sizes = {"first": first, "count": NUM_ROUNDS, "size": ROUND_MB * MB}
            for donor, partner in zip(donors, addresses[::-1], strict=True):
                donor.put("take_rounds", partner=partner, pause=ROUND_PAUSE, **sizes)

        def get_rounds() -> float:
            return statistics.fmean(second for answer in get_all(donors) for second in answer["seconds"])

        put_rounds(0)
        alone = get_rounds()
        put_rounds(NUM_ROUNDS)
        seconds = fetch(2)
        meanwhile = get_rounds()
    rate = min(DOWN_MBIT, 2 * UP_MBIT) * 1e6 / 8
    return {"link_over_ideal": seconds / (size_mb * MB / rate), "rounds_slower": meanwhile / alone - 1}
