"""Checks whether peers' addresses can be reached over TCP, and what prevents it: names, routes, firewalls."""

from __future__ import annotations

import contextlib
import errno
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import trio

from farandole.protocol.mesh.dialling import HTTPS_PORT
from farandole.protocol.mesh.reachability import is_global

from ...base.errors import StrangerError
from ...mesh.addresses import PRIVATE, distance_class
from ...mesh.host import Host
from .causes import Finding, found, lessen

RESOLVE_TIMEOUT: Final = 5.0
# A lost SYN is sent again after one second and after three.
KNOCK_TIMEOUT: Final = 4.0
PROVE_TIMEOUT: Final = 8.0
# Probed where a peer's own port is silent: a machine that is on answers or refuses. No service uses the last one.
OTHER_PORTS: Final = (HTTPS_PORT, 80, 33_433)
# Documentation addresses (RFC 5737, RFC 3849): nothing is sent there, the system is only asked for the route.
_ELSEWHERE: Final = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
_NAMED: Final = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/(\d{1,5})(?:/.*)?")
_FAMILIES: Final = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}
# Doors probed at once; an invite has eight.
MAX_DOORS: Final = 16


class Knock(StrEnum):
    """The answer of a TCP port."""

    OPEN = "open"
    REFUSED = "refused"
    SILENT = "silent"
    NO_ROUTE = "no-route"


@dataclass
class Door:
    """One address of one peer, and the results of its checks."""

    peer: bytes
    address: str
    kind: str = ""
    name: str = ""
    port: int = 0
    ips: list[str] = field(default_factory=list)
    knock: Knock | None = None
    is_proved: bool = False
    error: Exception | None = None
    """Why the peer is not behind an open port."""

    @property
    def is_relayed(self) -> bool:
        """True if the address reaches the peer through a relay."""
        return "/p2p-circuit" in self.address


def make_doors(addresses: Iterable[tuple[bytes, str]]) -> list[Door]:
    """Make doors of the first `MAX_DOORS` TCP addresses among peers' multiaddrs."""
    doors = [
        Door(peer, address, match[1], match[2], int(match[3]))
        for peer, address in addresses
        if (match := _NAMED.fullmatch(address))
    ]
    return doors[:MAX_DOORS]


def has_route() -> bool:
    """Return whether the system has a route to the internet, over IPv4 or IPv6."""
    for family, elsewhere in _ELSEWHERE.items():
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))
            return True
    return False


async def resolve(doors: Sequence[Door]) -> list[Finding]:
    """Fill in the doors' IP addresses; return a finding for each name."""
    findings: dict[str, Finding] = {}

    async def look_up(door: Door) -> None:
        if not door.kind.startswith("dns"):
            door.ips = [door.name]
            return
        family = _FAMILIES.get(door.kind, socket.AF_UNSPEC)
        why: object = f"no answer within {RESOLVE_TIMEOUT:g} s"
        with trio.move_on_after(RESOLVE_TIMEOUT):
            try:
                answers = await trio.socket.getaddrinfo(door.name, door.port, family, socket.SOCK_STREAM)
                door.ips = list(dict.fromkeys(str(answer[4][0]) for answer in answers))
            except (OSError, UnicodeError) as error:
                why = error
        if door.ips:
            cause = "dns-fine" if any(map(is_global, door.ips)) else "dns-private"
            findings[door.name] = found(cause, name=door.name, ips=", ".join(door.ips))
        else:
            findings[door.name] = found("dns-unresolved", name=door.name, why=why)

    async with trio.open_nursery() as nursery:
        for door in doors:
            nursery.start_soon(look_up, door)
    return list(findings.values()) or [found("dns-none")]


async def knock(ip: str, port: int) -> Knock:
    """Try to open a TCP connection, and close it."""
    family = trio.socket.AF_INET6 if ":" in ip else trio.socket.AF_INET
    with trio.socket.socket(family, trio.socket.SOCK_STREAM) as probe:
        try:
            with trio.fail_after(KNOCK_TIMEOUT):
                await probe.connect((ip, port))
        except trio.TooSlowError:
            return Knock.SILENT
        except ConnectionRefusedError:
            return Knock.REFUSED
        except OSError as error:
            return Knock.SILENT if error.errno == errno.ETIMEDOUT else Knock.NO_ROUTE
    return Knock.OPEN


async def knock_at_all(host: Host, doors: Sequence[Door]) -> None:
    """Fill in each door's answer, and whether the peer is behind it."""

    async def try_door(door: Door) -> None:
        for ip in door.ips:
            door.knock = await knock(ip, door.port)
            if door.knock is not Knock.OPEN:
                continue
            try:
                with trio.fail_after(PROVE_TIMEOUT):
                    if door.is_relayed:
                        await host.connect(door.peer, [door.address], PROVE_TIMEOUT)
                    else:
                        await host.upgrader.prove(door.peer, (ip, door.port))
                door.is_proved = True
            except Exception as error:  # whatever the handshake raises, the peer was not reached
                door.error = error
            return

    async with trio.open_nursery() as nursery:
        for door in doors:
            nursery.start_soon(try_door, door)


async def examine_egress(doors: Sequence[Door]) -> Finding:
    """Find which outgoing TCP ports this network allows, by the doors and the machines behind silent ones."""
    said: dict[tuple[str, int], Knock] = {}
    for door in doors:
        if door.knock is not None and door.ips:
            said[door.ips[0], door.port] = door.knock
    silent = list(dict.fromkeys(ip for (ip, _), knocked in said.items() if knocked is Knock.SILENT))

    async def try_port(ip: str, port: int) -> None:
        said[ip, port] = await knock(ip, port)

    async with trio.open_nursery() as nursery:
        for ip in silent:
            for port in OTHER_PORTS:
                if (ip, port) not in said:
                    nursery.start_soon(try_port, ip, port)
    if not said:
        return found("egress-untold")
    # A port that refuses has been reached, too.
    answered = {place for place, knocked in said.items() if knocked in (Knock.OPEN, Knock.REFUSED)}
    # One machine that answers on one port and drops the others may have a firewall of its own; not all of them.
    is_one_half_silent = any(
        knocked is Knock.SILENT and (ip, HTTPS_PORT) in answered for (ip, _), knocked in said.items()
    )
    if is_one_half_silent and all(port == HTTPS_PORT for _, port in answered):
        return found("egress-only-443")
    if answered:
        return found("egress-fine", ports=", ".join(map(str, sorted({port for _, port in answered}))))
    if all(knocked is Knock.NO_ROUTE for knocked in said.values()) or not has_route():
        return found("egress-offline")
    return found("egress-silent")


def judge_doors(doors: Sequence[Door], egress: Finding) -> list[Finding]:
    """Return a finding for each address; while one reaches its peer, the others are at most warnings.

    Another finding is of all addresses: that they are private ones, where none of them reaches its peer.
    """
    if not doors:
        return [found("bootstrap-none")]
    findings = [
        found(
            _cause_of(door, egress),
            address=door.address,
            port=door.port,
            seconds=KNOCK_TIMEOUT,
            why=str(door.error) or repr(door.error),
        )
        for door in doors
    ]
    if any(door.is_proved for door in doors):
        return [lessen(finding) for finding in findings]
    if all(distance_class(door.address) >= PRIVATE for door in doors):
        findings.append(found("invite-private", hosts=", ".join(dict.fromkeys(door.name for door in doors))))
    return findings


def _cause_of(door: Door, egress: Finding) -> str:
    if door.is_proved:
        return "bootstrap-fine"
    if not door.ips:
        return "bootstrap-unresolved"
    match door.knock:
        case Knock.OPEN if door.is_relayed:
            return "bootstrap-behind-relay"
        case Knock.OPEN if isinstance(door.error, StrangerError):
            return "bootstrap-stranger"
        case Knock.OPEN:
            return "bootstrap-no-handshake"
        case Knock.REFUSED:
            return "bootstrap-refused"
        case Knock.NO_ROUTE:
            return "bootstrap-no-route" if is_global(door.ips[0]) else "bootstrap-private"
    if egress.cause == "egress-only-443" and door.port != HTTPS_PORT:
        return "bootstrap-filtered"
    return "bootstrap-silent"
