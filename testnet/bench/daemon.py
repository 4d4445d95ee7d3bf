"""Real daemons of a benchmark, paused, in a run of their own: what is measured is the mesh, and no trainer."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.control import ControlError, NoNodeError, call
from farandole.node.status.status import NodeStatus
from farandole.protocol.run.manifest import SignedManifest, manifest_from_dict, sign_manifest

from ..natlab.groups import Leash
from ..natlab.namespace import held
from .process import BenchError

# A busy machine takes this long to start a daemon, and to verify three thousand signatures.
START_TIMEOUT: Final = 180.0
LOOK_INTERVAL: Final = 0.25

# The model is minimal: it is loaded once at most, before the pause.
_RUN: Final[Mapping[str, Any]] = {
    "name": "a large run",
    "model": {"num_layers": 1, "width": 16, "num_heads": 2, "hidden": 32, "context": 16, "vocabulary": 256},
    "inner": {"batch_size": 2},
    "rounds": {"inner_steps": 0, "round_seconds": 30.0, "exchange_seconds": 5.0},
    "data": {"source": "text"},
}


def sign_run() -> SignedManifest:
    """Return the manifest of a new run."""
    return sign_manifest(manifest_from_dict(_RUN), Ed25519PrivateKey.generate())


@contextlib.contextmanager
def running_daemon(
    leash: Leash, home: Path, signed: SignedManifest, options: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a paused node in a new ``home``. Its output is in a file beside that, with ``.log`` behind its name."""
    shutil.rmtree(home, ignore_errors=True)
    manifest, text = (home.with_suffix(suffix) for suffix in (".manifest", ".txt"))
    manifest.write_bytes(signed.encode())
    text.write_text("Nobody trains on this text. " * 1_000)
    command = [sys.executable, "-m", "farandole.node", "join", str(manifest), "--home", str(home), "--data", str(text)]
    command += ["--listen", "/ip4/127.0.0.1/tcp/0", "--no-mdns", "--no-upnp", *options]
    with (
        home.with_suffix(".log").open("wb") as output,
        held(command, leash, stdout=output, stderr=output) as process,
    ):
        ask_node(home, "pause")
        yield process


def ask_node(home: Path, method: str, **parameters: Any) -> Any:
    """Return the daemon's answer, and retry until it is up."""
    deadline = time.monotonic() + START_TIMEOUT
    while True:
        try:
            return call(home, method, **parameters)
        except (NoNodeError, ControlError) as error:
            if time.monotonic() > deadline:
                raise BenchError(f"the daemon is not to be had: {error}; see {home / 'log'}") from error
            time.sleep(LOOK_INTERVAL)  # the daemon starts in a process of its own


def wait_for_node(home: Path, is_so: Callable[[NodeStatus], bool]) -> NodeStatus:
    """Return the daemon's status as soon as it is so."""
    deadline = time.monotonic() + START_TIMEOUT
    while True:
        status = msgspec.convert(ask_node(home, "status", max_members=0), NodeStatus)
        if is_so(status):
            return status
        if time.monotonic() > deadline:
            raise BenchError(f"the daemon does not come so far: {status.phase}, {status.run.members_live} live members")
        time.sleep(LOOK_INTERVAL)  # the daemon sends no event for this, so poll it
