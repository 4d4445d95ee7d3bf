"""Network namespaces in which nodes run, made by a testnet for itself.

A namespace lives as long as the process that holds it, and a device as long as its namespace, so nothing is left when
the testnet ends, in whatever way. Needs Linux and root: the kernel gives no other user a namespace with a device whose
rate they can limit.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from farandole.protocol.wire.errors import FarandoleError

from .groups import OF_ITS_OWN, Leash, kill_group

_TUN: Final = Path("/dev/net/tun")
# The Debian package of each required tool.
_PACKAGES: Final = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "nft": "nftables",
    "miniupnpd": "miniupnpd-nftables",
}
# Holds a namespace, and prints a line when it has it.
_HOLDER: Final = ("unshare", "--net", "sh", "-c", "echo; exec sleep infinity")


class NamespaceError(FarandoleError):
    """Networks of namespaces cannot be made here; the message says what is missing."""


class CommandError(FarandoleError):
    """A command that makes or changes a network failed; the message says which, and why."""


@dataclass(frozen=True)
class Namespace:
    """A network namespace, by the process that holds it."""

    holder: int

    @property
    def enter(self) -> tuple[str, ...]:
        """Return the command prefix that runs a command in the namespace."""
        return ("nsenter", f"--net=/proc/{self.holder}/ns/net")

    def run(self, script: str, given: str = "") -> str:
        """Run a shell script in the namespace, and return its output; raises `CommandError` if a line of it fails."""
        command = [*self.enter, "sh", "-euc", script]
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CommandError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout


@dataclass(frozen=True)
class Location:
    """The place where a node runs."""

    ip: str = "127.0.0.1"
    """The address on which the node listens."""
    port: int | None = None
    """The port on which the node listens; None: any free one."""
    namespace: Namespace | None = None
    """The network that it is in; None: the machine's own."""

    @property
    def enter(self) -> Sequence[str]:
        """Return the command prefix that runs a command in this place."""
        return self.namespace.enter if self.namespace else ()


@contextlib.contextmanager
def open_namespace(leash: Leash) -> Iterator[Namespace]:
    """Open a new namespace, with nothing but its loopback interface."""
    with held(_HOLDER, leash, stdout=subprocess.PIPE) as holder:
        if holder.stdout is None or not holder.stdout.readline():
            raise NamespaceError("nodes need a network namespace each, which this system does not give")
        namespace = Namespace(holder.pid)
        namespace.run("ip link set lo up")
        yield namespace


@contextlib.contextmanager
def held(command: Sequence[str], leash: Leash, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process until the block or the testnet ends; ``options`` are passed to `subprocess.Popen`."""
    options = {"stdin": subprocess.DEVNULL, **options}
    with subprocess.Popen(command, **OF_ITS_OWN, **options) as process:
        leash.hold(process.pid)
        try:
            yield process
        finally:
            kill_group(process.pid)
            process.wait()
            leash.release(process.pid)


def require(*tools: str) -> None:
    """Raise `NamespaceError`, saying what is missing: Linux, root, or a tool."""
    if sys.platform != "linux" or not _TUN.exists():
        raise NamespaceError("networks between nodes need Linux, and its device /dev/net/tun")
    if os.geteuid() != 0:
        raise NamespaceError("networks between nodes need root, who alone may make network namespaces: use sudo")
    if missing := [tool for tool in ("ip", "tc", "nsenter", "unshare", *tools) if shutil.which(tool) is None]:
        packages = " ".join(sorted({_PACKAGES[tool] for tool in missing}))
        raise NamespaceError(f"{', '.join(missing)} not found; on Debian or Ubuntu: apt install {packages}")
