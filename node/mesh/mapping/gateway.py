"""The default gateway of the local network, the one machine there that is asked for ports, and what it opens."""

from __future__ import annotations

import ipaddress
import re
import socket
import struct
import sys
from dataclasses import dataclass
from typing import Final

import trio

from farandole.protocol.mesh.reachability import Address
from farandole.protocol.wire.errors import FarandoleError

from ...base.system.processes import read_proc

# Flags in Linux's table for a route that is up and leads through a gateway (linux/route.h).
_UP_BY_GATEWAY: Final = 0x0003
# The command on macOS and the BSDs; it answers from memory.
_ROUTE_COMMAND: Final = ("/sbin/route", "-n", "get", "default")
ROUTE_TIMEOUT: Final = 3.0


class MappingError(FarandoleError):
    """The router does not do what it was asked for, or there is none; the message says why."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A port of the router that leads to one of this machine's."""

    port: int
    """This machine's port."""
    outer: Address
    """The outer address that the router reports; behind a second router it is not a public one."""
    seconds: float
    """The lease, unless it is renewed; infinite if the router knows no leases."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway and this machine's address, both in the same private network."""

    ip: str
    local_ip: str
    """This machine's address, as the gateway sees it."""


async def find_gateway() -> Gateway:
    """Find the gateway; raise `MappingError` if there is none, or if this machine has a public address."""
    ip = await _default_route()
    if ip is None or not _is_private(ip):
        raise MappingError("no home's router leads out of here")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ip, 9))  # sends nothing: asks the kernel for its choice
        except OSError as error:
            raise MappingError(f"no way to the router: {error}") from error
        local_ip = str(probe.getsockname()[0])
    if not _is_private(local_ip):
        raise MappingError("this machine has an address of its own on the internet")
    return Gateway(ip, local_ip)


def _is_private(ip: str) -> bool:
    parsed = ipaddress.IPv4Address(ip)
    return parsed.is_private and not parsed.is_loopback


async def _default_route() -> str | None:
    """Return the gateway's IPv4 address, if this system reports it."""
    try:
        if sys.platform == "linux":
            return gateway_of_linux(read_proc("net/route") or "")
        with trio.fail_after(ROUTE_TIMEOUT):
            done = await trio.run_process(_ROUTE_COMMAND, capture_stdout=True, capture_stderr=True, check=False)
        return gateway_of_bsd(done.stdout.decode(errors="replace"))
    except (OSError, trio.TooSlowError):
        return None


def gateway_of_linux(routes: str) -> str | None:
    """Parse /proc/net/route: return the gateway of the default route with the smallest metric."""
    found: list[tuple[int, str]] = []
    for line in routes.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 8 or fields[1] != "00000000" or fields[7] != "00000000":
            continue
        if int(fields[3], 16) & _UP_BY_GATEWAY == _UP_BY_GATEWAY:
            found.append((int(fields[6]), socket.inet_ntoa(struct.pack("=I", int(fields[2], 16)))))
    return min(found)[1] if found else None


def gateway_of_bsd(told: str) -> str | None:
    """Parse the output of ``route -n get default``."""
    match = re.search(r"(?m)^\s*gateway:\s*(\d{1,3}(?:\.\d{1,3}){3})\s*$", told)
    return match[1] if match else None
