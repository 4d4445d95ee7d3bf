"""The default gateway of the local network, the one machine there that is asked for ports; and asking by NAT-PMP.

NAT-PMP (RFC 6886) is a datagram there, a datagram back. Routers in homes that speak its successor PCP (RFC 6887) answer
it as well. The socket is connected, so the kernel lets through only datagrams from the gateway's address.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import struct
import sys
from dataclasses import dataclass
from typing import Final

import trio

from farandole.protocol.mesh.dialling import Address
from farandole.protocol.wire.errors import FarandoleError, RemoteProtocolError

from ...base.system.processes import read_proc

# Flags in Linux's table for a route that is up and leads through a gateway (linux/route.h).
_UP_BY_GATEWAY: Final = 0x0003
# The command on macOS and the BSDs; it answers from memory.
_ROUTE_COMMAND: Final = ("/sbin/route", "-n", "get", "default")
ROUTE_TIMEOUT: Final = 3.0


PORT: Final = 5_351
_VERSION: Final = 0
_GET_ADDRESS, _MAP_TCP = 0, 2
_IS_ANSWER: Final = 128
_ANSWER_TO_ADDRESS: Final = struct.Struct(">BBHI4s")
_ANSWER_TO_MAPPING: Final = struct.Struct(">BBHIHHI")
_QUESTION_FOR_MAPPING: Final = struct.Struct(">BBHHHI")
MAX_DATAGRAM: Final = 64
# The RFC's first pauses before it asks again (3.1); a router in the same house answers before the second.
PAUSES: Final = (0.25, 0.5, 1.0)
# By how much a router's clock may seem slow (3.6).
_CLOCK_RATE, _CLOCK_SLACK = 7 / 8, 2.0
_RESULTS: Final = {
    1: "it knows another version",
    2: "its owner does not want that",
    3: "it has no connection",
    4: "it has no more",
    5: "it does not do that",
}


class MappingError(FarandoleError):
    """The router does not do what it was asked for, or there is none; the message says why."""

    def __init__(self, message: str, code: int = 0) -> None:
        """``code``: what UPnP calls the error, 0 if nothing."""
        super().__init__(message)
        self.code = code


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


class NatPmpRouter:
    """A router that opens ports. Every call ends within a few seconds, and raises `MappingError` on failure."""

    def __init__(self, gateway: Gateway, port: int = PORT) -> None:
        self._gateway = gateway
        self._address = (gateway.ip, port)
        self._epoch: tuple[float, int] | None = None  # on trio's clock, and on the router's
        self._has_restarted = False

    @property
    def ip(self) -> str:
        """Its inner address."""
        return self._gateway.ip

    async def external_ip(self) -> str:
        """Return its outer address; raise `MappingError` on failure."""
        answer = await self._ask(bytes([_VERSION, _GET_ADDRESS]), _ANSWER_TO_ADDRESS)
        return str(ipaddress.IPv4Address(answer[4]))

    async def open_port(self, port: int, seconds: int) -> Opened:
        """Open a port, or keep it open; the router picks another outer port if it is taken. Raises `MappingError`."""
        inner, outer, granted = await self._map(port, port, seconds)
        if inner != port or not outer or not granted:
            raise MappingError("the router opens another port than it was asked for")
        return Opened(port, (await self.external_ip(), outer), min(granted, seconds))

    async def close_port(self, opened: Opened) -> None:
        """Close a port; raise `MappingError` on failure."""
        await self._map(opened.port, 0, 0)

    async def has_forgotten(self, opened: Opened) -> bool:
        """Return whether the router has dropped the mapping; raise `MappingError` on failure.

        Its clock, which restarts with its memory (3.6), and its outer address decide.
        """
        self._has_restarted = False
        return await self.external_ip() != opened.outer[0] or self._has_restarted

    async def _map(self, port: int, outer: int, seconds: int) -> tuple[int, int, int]:
        question = _QUESTION_FOR_MAPPING.pack(_VERSION, _MAP_TCP, 0, port, outer, seconds)
        inner, mapped, granted = (await self._ask(question, _ANSWER_TO_MAPPING))[4:]
        return inner, mapped, granted

    async def _ask(self, question: bytes, form: struct.Struct) -> tuple[int, ...]:
        """Return the fields of the answer to a question."""
        with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            try:
                await sock.connect(self._address)
                for pause in PAUSES:
                    await sock.send(question)
                    with trio.move_on_after(pause):
                        while True:
                            try:
                                return self._read(await sock.recv(MAX_DATAGRAM), question[1], form)
                            except RemoteProtocolError:
                                continue  # an answer to an earlier question, or nonsense
            except OSError as error:
                raise MappingError(f"the router speaks no NAT-PMP: {error}") from error
        raise MappingError("the router does not answer by NAT-PMP")

    def _read(self, data: bytes, asked: int, form: struct.Struct) -> tuple[int, ...]:
        """Parse an answer; `MappingError` if the router refuses, `RemoteProtocolError` if it answers something else."""
        if len(data) < 4 or data[1] != asked + _IS_ANSWER:
            raise RemoteProtocolError("no answer to the question")
        result = int.from_bytes(data[2:4], "big")
        if result or data[0] != _VERSION:
            raise MappingError(f"the router refuses by NAT-PMP: {_RESULTS.get(result, f'result {result}')}")
        if len(data) != form.size:
            raise RemoteProtocolError("an answer of another length")
        fields, now = form.unpack(data), trio.current_time()
        if self._epoch is not None:
            then, before = self._epoch
            self._has_restarted |= fields[3] + _CLOCK_SLACK < before + _CLOCK_RATE * (now - then)
        self._epoch = now, fields[3]
        return fields


async def find_natpmp_router(gateway: Gateway) -> NatPmpRouter:
    """Return the gateway, if it opens ports by NAT-PMP; raise `MappingError` if not."""
    router = NatPmpRouter(gateway)
    await router.external_ip()
    return router
