"""Network namespaces in which nodes run, made by a testnet for itself.

A namespace lives as long as the process that holds it, a veth pair as long as the namespaces of its ends, and a TUN
device as long as its descriptor, so nothing is left when the testnet ends, in whatever way. Needs Linux and root: the
kernel gives no other user a namespace with a device whose rate they can limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from farandole.protocol.wire.errors import FarandoleError

from .groups import OF_ITS_OWN, Leash, kill_group

# linux/if_tun.h
_TUNSETIFF: Final = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
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

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Enter the namespace in this thread: a socket or device that is made meanwhile belongs to it for good."""
        with Path("/proc/thread-self/ns/net").open() as own, Path(f"/proc/{self.holder}/ns/net").open() as its:
            _set_namespace(its.fileno())
            try:
                yield
            finally:
                _set_namespace(own.fileno())


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # `os.setns` comes with Python 3.12
    if libc.setns(descriptor, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


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


@contextlib.contextmanager
def open_tun(namespace: Namespace, name: str) -> Iterator[int]:
    """Open a TUN device in the namespace, up, without an address; the descriptor reads and writes IP packets."""
    import fcntl  # only Linux has it (`require`)

    with namespace.entered():
        descriptor = os.open(_TUN, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
        namespace.run(f"ip link set dev {name} up")
        yield descriptor
    finally:
        os.close(descriptor)


def require(*tools: str) -> None:
    """Raise `NamespaceError`, saying what is missing: Linux, root, or a tool."""
    if sys.platform != "linux" or not _TUN.exists():
        raise NamespaceError("networks between nodes need Linux, and its device /dev/net/tun")
    if os.geteuid() != 0:
        raise NamespaceError("networks between nodes need root, who alone may make network namespaces: use sudo")
    if missing := [tool for tool in ("ip", "tc", "nsenter", "unshare", *tools) if shutil.which(tool) is None]:
        packages = " ".join(sorted({_PACKAGES[tool] for tool in missing}))
        raise NamespaceError(f"{', '.join(missing)} not found; on Debian or Ubuntu: apt install {packages}")
