"""What a mesh costs the programs that use it: farandole's `Mesh`, and Lattica's SDK.

Two programs on loopback, each a process. Those of farandole use a daemon each, as on a volunteer's machine: bytes go
from the program over a local socket to its node, encrypted to the other node, and to the other program. Lattica is in
the programs' own processes. Nothing is measured before both are connected.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.control import ControlError, NoNodeError, call
from farandole.node.status.status import NodeStatus
from farandole.protocol.run.manifest import SignedManifest, manifest_from_dict, sign_manifest

from ..natlab.groups import Leash, open_leash
from ..natlab.namespace import held
from .process import (
    MB,
    BenchError,
    BenchWorker,
    Say,
    ask_all,
    elapsed,
    median_of,
    obtain_python,
    open_worker,
    peer_command,
    take_turns,
    worker_command,
)

REQUEST_BYTES: Final = 1_000
WARM_UPS: Final = 2
# A busy machine takes this long to start a daemon.
START_TIMEOUT: Final = 180.0
LOOK_INTERVAL: Final = 0.1
OURS, LATTICA = "farandole", "Lattica"
_RUN: Final = {
    "name": "bench-mesh",
    "model": {"num_layers": 1, "width": 16, "num_heads": 2, "hidden": 32, "context": 16, "vocabulary": 256},
    "data": {"source": "text"},
}


def measure_mesh(
    folder: Path, size_mb: int, requests: int, repeats: int, cache: Path | None, say: Say
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Measure both in turns, and return what could not be measured; without a cache folder, not Lattica.

    Of each, in seconds: ``call``, a request of `REQUEST_BYTES`, whose answer is as long; ``push``, until as many bytes
    as asked for are at the other program, on a stream; ``fetch``, of a file of as many bytes, with its hashes.
    """
    problems: dict[str, str] = {}
    log = folder / "mesh.log"
    with contextlib.ExitStack() as stack:
        say("mesh: starting two daemons")
        homes = [str(home) for home in stack.enter_context(_open_nodes(folder))]
        ours = stack.enter_context(_open_pair(OURS, worker_command("program"), homes, log))
        ways: dict[str, Callable[[], dict[str, float]]] = {OURS: partial(_measure, ours, requests, size_mb * MB)}
        if cache is not None:
            try:
                command = peer_command(obtain_python("lattica", cache, say), "lattica")
                pair = stack.enter_context(_open_pair(LATTICA, command, ["", ""], log))
                ways[LATTICA] = partial(_measure, pair, requests, size_mb * MB)
            except BenchError as error:
                problems[LATTICA] = str(error)
        done, dropped = take_turns("mesh", ways, [LATTICA], repeats, WARM_UPS, say)
    return {who: median_of(turns) for who, turns in done.items() if turns}, problems | dropped


@contextlib.contextmanager
def _open_nodes(folder: Path) -> Iterator[list[Path]]:
    """Run two connected nodes, paused, and return their homes."""
    signed = sign_manifest(manifest_from_dict(_RUN), Ed25519PrivateKey.generate())
    homes = [(folder / f"mesh-{name}").absolute() for name in ("first", "second")]
    with open_leash() as leash, _running_node(leash, homes[0], signed, []):
        address = _wait_for(homes[0], lambda status: bool(status.addresses)).addresses[0]
        with _running_node(leash, homes[1], signed, ["--bootstrap", address]):
            for home in homes:
                _wait_for(home, lambda status: status.run.members_live >= 2)
                call(home, "pause")
            yield homes


@contextlib.contextmanager
def _running_node(
    leash: Leash, home: Path, signed: SignedManifest, options: Sequence[str]
) -> Iterator[subprocess.Popen[bytes]]:
    shutil.rmtree(home, ignore_errors=True)
    manifest, text = (home.with_suffix(suffix) for suffix in (".manifest", ".txt"))
    manifest.write_bytes(signed.encode())
    text.write_text("Nobody trains on this text. " * 1_000)
    command = [sys.executable, "-m", "farandole.node", "join", str(manifest), "--home", str(home), "--data", str(text)]
    command += ["--listen", "/ip4/127.0.0.1/tcp/0", "--no-mdns", "--no-upnp", *options]
    with home.with_suffix(".log").open("wb") as output, held(command, leash, stdout=output, stderr=output) as process:
        yield process


def _wait_for(home: Path, is_so: Callable[[NodeStatus], bool]) -> NodeStatus:
    """Return the daemon's status as soon as it is so."""
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        with contextlib.suppress(NoNodeError, ControlError):
            status = msgspec.convert(call(home, "status", max_members=0), NodeStatus)
            if is_so(status):
                return status
        time.sleep(LOOK_INTERVAL)  # the daemon sends no event for this, so poll it
    raise BenchError(f"the daemon of {home} does not come so far; see {home.with_suffix('.log')}")


@contextlib.contextmanager
def _open_pair(who: str, command: Sequence[str], places: Sequence[str], log: Path) -> Iterator[list[BenchWorker]]:
    """Open two connected programs; of the second, figures are taken."""
    with open_worker(f"{who} 0", command, log) as first, open_worker(f"{who} 1", command, log) as second:
        addresses = first.ask("open", place=places[0], peers=[])["addresses"]
        second.ask("open", place=places[1], peers=addresses)
        wait_until_connected(who, [first, second])
        yield [first, second]


def wait_until_connected(who: str, pair: Sequence[BenchWorker]) -> None:
    """Wait until both of a pair know each other."""
    give_up_at = time.monotonic() + START_TIMEOUT
    while not all(answer["is_connected"] for answer in ask_all(pair, "is_connected")):
        if time.monotonic() > give_up_at:
            raise BenchError(f"{who}: the two did not find each other in {START_TIMEOUT:g} s")
        time.sleep(LOOK_INTERVAL)  # there is no event for it, so poll


def _measure(pair: Sequence[BenchWorker], requests: int, size: int) -> dict[str, float]:
    giver, asker = pair
    seconds = asker.ask("call", number=requests, size=REQUEST_BYTES)["seconds"]
    push = elapsed([asker.ask("push", size=size)])
    file = giver.ask("share", size=size)["file"]
    fetch = elapsed([asker.ask("fetch", file=file, size=size)])
    return {"call": statistics.median(seconds), "push": push, "fetch": fetch}
