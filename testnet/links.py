"""Homes with slow links: each node in a network namespace of its own, behind a link with a rate and a delay.

A namespace lives as long as the process that holds it, and a TUN device as long as its descriptor, so nothing is left
when the testnet ends, however it does. Linux only, and only for root: the kernel gives nobody else a namespace with a
device that it may shape.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from farandole.protocol.errors import FarandoleError

from .leash import Leash, kill_group
from .scenario import Link

# linux/if_tun.h
_TUNSETIFF: Final = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_TUN: Final = Path("/dev/net/tun")
_TOOLS: Final = ("ip", "tc", "nsenter", "unshare")
# What a home router's buffer holds of a full uplink.
_BUFFER: Final = "200ms"
_BURST: Final = "16kb"
_NETWORK: Final = "10.77.0"
# Holds a namespace, and says when it has it.
_HOLDER: Final = ("unshare", "--net", "sh", "-c", "echo; exec sleep infinity")


class LinksError(FarandoleError):
    """Links cannot be made here; the message says what is missing."""


@dataclass(frozen=True)
class Place:
    """Where a node runs: its address, and the command that takes it there."""

    ip: str = "127.0.0.1"
    enter: Sequence[str] = ()


@contextlib.contextmanager
def open_places(link: Link | None, count: int, leash: Leash) -> Iterator[list[Place]]:
    """Places for so many nodes: all on loopback if there is no link. Raises `LinksError`."""
    if link is None:
        yield [Place()] * count
        return
    _check()
    with contextlib.ExitStack() as stack:
        places, ports = [], []
        for index in range(count):
            ip = f"{_NETWORK}.{index + 1}"
            holder = stack.enter_context(_held(_HOLDER, leash))
            if holder.stdout is None or not holder.stdout.readline():
                raise LinksError("links between nodes need a network namespace each, which this system does not give")
            descriptor = _open_tun(f"far{index}")
            stack.callback(os.close, descriptor)
            _configure(f"far{index}", ip, holder.pid, link)
            ports.append((ip, descriptor))
            places.append(Place(ip, ("nsenter", f"--net=/proc/{holder.pid}/ns/net")))
        down, delay = link.down_mbit * 1e6 / 8, link.delay_ms / 1e3
        forwarder = [sys.executable, "-m", "farandole.testnet.link_forwarder", str(down), str(delay)]
        forwarder += [f"{ip}={descriptor}" for ip, descriptor in ports]
        stack.enter_context(_held(forwarder, leash, [descriptor for _, descriptor in ports]))
        yield places


def _check() -> None:
    if sys.platform != "linux" or not _TUN.exists():
        raise LinksError("links between nodes need Linux, and its device /dev/net/tun")
    if os.geteuid() != 0:
        raise LinksError("links between nodes need root, who alone may make network namespaces: use sudo")
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        raise LinksError(f"{', '.join(missing)} not found; on Debian or Ubuntu: apt install iproute2 util-linux")


@contextlib.contextmanager
def _held(command: Sequence[str], leash: Leash, descriptors: Sequence[int] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block, or with the testnet."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, pass_fds=descriptors, start_new_session=True, stdout=subprocess.PIPE
    ) as process:
        leash.hold(process.pid)
        try:
            yield process
        finally:
            kill_group(process.pid)
            process.wait()
            leash.release(process.pid)


def _open_tun(name: str) -> int:
    descriptor = os.open(_TUN, os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return descriptor


def _configure(device: str, ip: str, holder: int, link: Link) -> None:
    """Take the device into the holder's namespace, and shape it."""
    enter = ["nsenter", f"--net=/proc/{holder}/ns/net"]
    rate = f"{link.up_mbit:g}mbit"
    for command in (
        ["ip", "link", "set", device, "netns", str(holder)],
        [*enter, "ip", "link", "set", "lo", "up"],
        [*enter, "ip", "address", "add", f"{ip}/24", "dev", device],
        [*enter, "ip", "link", "set", device, "up"],
        [*enter, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", _BURST, "latency", _BUFFER],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LinksError(f"links between nodes cannot be made: {' '.join(command)}: {done.stderr.strip()}")
